// RoPE and QK norm. A head stays in the cache between its norm and its rotation.
#include "kernels/rope.hpp"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// One head in an array.
template <class T>
struct Head {
  Array<T> x;
  int64_t at;
  HWY_INLINE VF full(int64_t i) const { return x.at(at + i); }
  // Read before, so without prefetching.
  HWY_INLINE VF reload(int64_t i) const { return x.at_without_prefetch(at + i); }
  HWY_INLINE VF part(int64_t i, int64_t n) const { return x.part(at + i, n); }
  HWY_INLINE VF load_lanes(int64_t i, int64_t n) const { return n == kStep ? full(i) : part(i, n); }
  HWY_INLINE void put(int64_t i, VF v) const { x.put(at + i, v); }
  HWY_INLINE void put_part(int64_t i, VF v, int64_t n) const { x.put_part(at + i, v, n); }
  HWY_INLINE void store_lanes(int64_t i, VF v, int64_t n) const {
    n == kStep ? put(i, v) : put_part(i, v, n);
  }
};

// ---- rotation

// One token's row of the tables; sign -1: the inverse rotation.
struct Angles {
  const float *cos, *sin;
  int64_t half;
  VF sign;
  HWY_INLINE VF cosine(int64_t i, int64_t n) const { return load_lanes(cos + i, n); }
  HWY_INLINE VF sine(int64_t i, int64_t n) const { return hn::Mul(sign, load_lanes(sin + i, n)); }
};

template <class T>
HWY_INLINE void rotate_halves(const Head<T>& x, const Head<T>& y, const Angles& angles) {
  const int64_t half = angles.half;
  for (int64_t i = 0; i < half; i += kStep) {
    const int64_t n = std::min(kStep, half - i);
    const VF a = x.load_lanes(i, n), b = x.load_lanes(half + i, n), c = angles.cosine(i, n),
             s = angles.sine(i, n);
    y.store_lanes(i, hn::NegMulAdd(b, s, hn::Mul(a, c)), n);
    y.store_lanes(half + i, hn::MulAdd(a, s, hn::Mul(b, c)), n);
  }
}

template <class T>
HWY_INLINE void rotate_pairs(const Head<T>& x, const Head<T>& y, const Angles& angles) {
  for (int64_t i = 0; i < angles.half; i += kStep) {
    const int64_t n = std::min(kStep, angles.half - i);
    // Separates two vectors of pairs into first and second members, and interleaves them again.
    HWY_ALIGN float pairs[2 * kLanes] = {};
    for (int64_t j = 0; j < 2; ++j)
      if (const int64_t m = std::min(kStep, 2 * n - j * kStep); m > 0)
        store(x.part(2 * i + j * kStep, m), pairs + j * kStep);
    VF a, b;
    hn::LoadInterleaved2(DF(), pairs, a, b);
    const VF c = angles.cosine(i, n), s = angles.sine(i, n);
    hn::StoreInterleaved2(hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c)), DF(), pairs);
    for (int64_t j = 0; j < 2; ++j)
      if (const int64_t m = std::min(kStep, 2 * n - j * kStep); m > 0)
        y.put_part(2 * i + j * kStep, load(pairs + j * kStep), m);
  }
}

// y = the rotated x. The last elements do not rotate; they are copied where y is another array.
template <class T>
HWY_INLINE void rotate(const Head<T>& x, const Head<T>& y, const RopeShape& s, const Angles& angles,
                       bool in_place) {
  if (s.interleaved)
    rotate_pairs(x, y, angles);
  else
    rotate_halves(x, y, angles);
  const int64_t rest = 2 * angles.half;
  if (in_place || rest == s.head_dim) return;
  for_vectors(
      s.head_dim - rest, [&](int64_t i) HWY_ATTR { y.put(rest + i, x.full(rest + i)); },
      [&](int64_t i, int64_t n) HWY_ATTR { y.put_part(rest + i, x.part(rest + i, n), n); });
}

// ---- norm of a head, with the sums of norm.cpp

struct Statistics {
  float mean, rstd;
};
template <class T>
HWY_INLINE Statistics statistics_of(const Head<T>& x, const RopeShape& s) {
  const int64_t cols = s.head_dim;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  float mean = 0;
  if (s.norm == QkNorm::layer) {
    VF sum = hn::Zero(DF());
    for_vectors(
        cols, [&](int64_t i) HWY_ATTR { sum = hn::Add(sum, x.full(i)); },
        [&](int64_t i, int64_t n) HWY_ATTR { sum = hn::Add(sum, x.part(i, n)); });
    mean = sum_lanes(sum) * inverse_cols;
  }
  const VF vmean = splat(mean);
  VF squares = hn::Zero(DF());
  int64_t i = 0;
  for (; i + kStep <= cols; i += kStep) {
    const VF v = hn::Sub(x.full(i), vmean);
    squares = hn::MulAdd(v, v, squares);
  }
  float total = sum_lanes(squares);
  if (i < cols) {
    HWY_ALIGN float rest[kLanes];
    store(x.part(i, cols - i), rest);
    for (int64_t j = 0; j < cols - i; ++j) total += (rest[j] - mean) * (rest[j] - mean);
  }
  return {mean, 1.0f / std::sqrt(total * inverse_cols + s.eps)};
}

// gamma and beta of the queries or of the keys.
template <class T>
struct Weights {
  Array<T> gamma, beta;
  bool has_beta;
  VF offset;
  Weights(In g, In b, float gamma_offset)
      : gamma(array_of<T>(g)),
        beta(array_of<T>(b)),
        has_beta(static_cast<bool>(b)),
        offset(splat(gamma_offset)) {}
  HWY_INLINE VF factor(int64_t i, int64_t n) const { return hn::Add(gamma.lanes(i, n), offset); }
  HWY_INLINE VF shift(int64_t i, int64_t n) const { return beta.lanes(i, n); }
};

template <class T>
HWY_INLINE void normalize(const Head<T>& x, const Head<T>& y, const RopeShape& s, const Weights<T>& w) {
  const Statistics of_head = statistics_of(x, s);
  const VF mean = splat(of_head.mean), rstd = splat(of_head.rstd);
  const auto value = [&](VF v, int64_t i, int64_t n) HWY_ATTR {
    const VF scaled = hn::Mul(hn::Mul(hn::Sub(v, mean), rstd), w.factor(i, n));
    return w.has_beta ? hn::Add(scaled, w.shift(i, n)) : scaled;
  };
  for_vectors(
      s.head_dim, [&](int64_t i) HWY_ATTR { y.put(i, value(x.reload(i), i, kStep)); },
      [&](int64_t i, int64_t n) HWY_ATTR { y.put_part(i, value(x.part(i, n), i, n), n); });
}

// dx from dy at the same place, as in norm.cpp: dx = rstd (h - mean(h) - xhat mean(h xhat)) with h = dy
// gamma. Adds to dgamma and dbeta, which have head_dim elements; null: not wanted.
template <class T>
HWY_INLINE void normalize_backward(const Head<T>& dx, const Head<T>& x, const RopeShape& s,
                                   const Weights<T>& w, float* dgamma, float* dbeta) {
  const Statistics of_head = statistics_of(x, s);
  const float inverse_cols = 1.0f / static_cast<float>(s.head_dim);
  const VF mean = splat(of_head.mean), rstd = splat(of_head.rstd);
  const auto hat = [&](VF v) HWY_ATTR { return hn::Mul(hn::Sub(v, mean), rstd); };
  VF sum_h = hn::Zero(DF()), sum_hx = sum_h;
  const auto add = [&](int64_t i, int64_t n, VF dy, VF v) HWY_ATTR {
    const VF xhat = hat(v), h = hn::Mul(dy, w.factor(i, n));
    sum_h = hn::Add(sum_h, h);
    // Lanes beyond the head add nothing, because dy is 0 there.
    sum_hx = hn::MulAdd(h, xhat, sum_hx);
    if (!dgamma) return;
    store(hn::MulAdd(dy, xhat, load(dgamma + i)), dgamma + i);
    store(hn::Add(dy, load(dbeta + i)), dbeta + i);
  };
  for_vectors(
      s.head_dim, [&](int64_t i) HWY_ATTR { add(i, kStep, dx.reload(i), x.reload(i)); },
      [&](int64_t i, int64_t n) HWY_ATTR { add(i, n, dx.part(i, n), x.part(i, n)); });
  const VF mean_h = splat(s.norm == QkNorm::layer ? sum_lanes(sum_h) * inverse_cols : 0.0f),
           mean_hx = splat(sum_lanes(sum_hx) * inverse_cols);
  const auto value = [&](int64_t i, int64_t n, VF dy, VF v) HWY_ATTR {
    const VF h = hn::Mul(dy, w.factor(i, n));
    return hn::Mul(rstd, hn::NegMulAdd(hat(v), mean_hx, hn::Sub(h, mean_h)));
  };
  for_vectors(
      s.head_dim, [&](int64_t i) HWY_ATTR { dx.put(i, value(i, kStep, dx.reload(i), x.reload(i))); },
      [&](int64_t i, int64_t n) HWY_ATTR { dx.put_part(i, value(i, n, dx.part(i, n), x.part(i, n)), n); });
}

// ---- the kernels

// One array of heads.
template <class T>
struct HeadArray {
  Array<T> x;
  HeadStrides strides;
  explicit HeadArray(const HeadsIn& heads) : x(array_of<T>(heads.data)), strides(heads.strides) {}
  HWY_INLINE Head<T> head(int64_t row, int64_t g, int64_t h) const { return {x, strides.at(row, g, h)}; }
  bool operator==(const HeadArray& o) const {
    return x.p == o.x.p && strides.token == o.strides.token && strides.group == o.strides.group &&
           strides.head == o.strides.head;
  }
};
// Calls body(kind, group, head) for a token's heads in the order of packed QKV: the queries of each group,
// then its key. `kind` (query or key) is a compile-time constant.
using Query = std::integral_constant<size_t, 0>;
using Key = std::integral_constant<size_t, 1>;
template <class Body>
HWY_INLINE void for_heads(const RopeShape& s, Body&& body) {
  for (int64_t g = 0; g < s.groups; ++g) {
    for (int64_t h = 0; h < s.heads_per_group; ++h) body(Query(), g, h);
    body(Key(), g, 0);
  }
}
HWY_INLINE Angles angles_of(const RopeShape& s, const RopeAngles& a, int64_t row, bool inverse) {
  const int64_t half = s.rotary_dim / 2, at = half > 0 ? int64_t{a.positions[row]} * half : 0;
  return {a.cos + at, a.sin + at, half, splat(inverse ? -1.0f : 1.0f)};
}
HWY_INLINE int64_t elements_of(const RopeShape& s) {
  return s.groups * (s.heads_per_group + 1) * s.head_dim;
}

// Arrays and weights of the queries, or of the keys.
template <class T>
struct ForwardHeads {
  HeadArray<T> in, out;
  Weights<T> weights;
  bool in_place = in == out;
};

void forward(Context& c, RopeShape s, HeadsIn q, HeadsIn k, RopeAngles angles, QkNormWeights weights,
             HeadsOut q_out, HeadsOut k_out) {
  by_type({q.data, k.data, q_out.data, k_out.data, weights.q_gamma, weights.q_beta, weights.k_gamma,
           weights.k_beta},
          [&](auto type) HWY_ATTR {
            using Heads = HeadArray<decltype(type)>;
            parallel_blocks(
                c, s.rows, rows_per_block(elements_of(s)), [&](int64_t begin, int64_t end, int) HWY_ATTR {
                  const ForwardHeads<decltype(type)> queries_and_keys[2] = {
                      {Heads(q), Heads(q_out), {weights.q_gamma, weights.q_beta, s.gamma_offset}},
                      {Heads(k), Heads(k_out), {weights.k_gamma, weights.k_beta, s.gamma_offset}}};
                  for (int64_t r = begin; r < end; ++r) {
                    const Angles rotation = angles_of(s, angles, r, false);
                    for_heads(s, [&](auto which, int64_t g, int64_t h) HWY_ATTR {
                      const auto& heads = queries_and_keys[which()];
                      const auto y = heads.out.head(r, g, h);
                      if (s.norm != QkNorm::none) normalize(heads.in.head(r, g, h), y, s, heads.weights);
                      const bool in_place = heads.in_place || s.norm != QkNorm::none;
                      rotate(in_place ? y : heads.in.head(r, g, h), y, s, rotation, in_place);
                    });
                  }
                });
          });
}

// Number of rows per block of partial sums. There are at most 64 blocks, which depend on the shape only.
HWY_INLINE int64_t backward_block_rows(const RopeShape& s) {
  return std::max(rows_per_block(elements_of(s)), ceil_div(s.rows, 64));
}
// Floats of one block's partial sums: gamma and beta of queries, then of keys, padded to full vectors.
HWY_INLINE int64_t partial_size(const RopeShape& s) {
  return 4 * round_up(s.head_dim, kStep);
}
WorkspaceSize backward_workspace(RopeShape s, bool weight_gradients) {
  if (!weight_gradients || s.norm == QkNorm::none) return {};
  const int64_t floats = ceil_div(s.rows, backward_block_rows(s)) * partial_size(s);
  return {static_cast<size_t>(floats) * sizeof(float), 0};
}

// Adds the partial sums to the gradients.
void add_partials(const RopeShape& s, const QkNormGradients& gradients, const float* partials) {
  const int64_t width = round_up(s.head_dim, kStep), size = partial_size(s),
                blocks = ceil_div(s.rows, backward_block_rows(s));
  float* const to[4] = {gradients.q_gamma, gradients.q_beta, gradients.k_gamma, gradients.k_beta};
  for (int64_t which = 0; which < 4; ++which) {
    if (!to[which]) continue;
    for (int64_t i = 0; i < s.head_dim; i += kStep) {
      VF sum = hn::Zero(DF());
      for (int64_t b = 0; b < blocks; ++b) sum = hn::Add(sum, load(partials + b * size + which * width + i));
      const int64_t n = std::min(kStep, s.head_dim - i);
      store_part(hn::Add(load_part(to[which] + i, n), sum), to[which] + i, n);
    }
  }
}

template <class T>
struct BackwardHeads {
  HeadArray<T> dy, x, dx;
  Weights<T> weights;
  bool in_place = dy == dx;
};

void backward(Context& c, RopeShape s, HeadsIn dq, HeadsIn dk, HeadsIn q, HeadsIn k, RopeAngles angles,
              QkNormWeights weights, HeadsOut dq_in, HeadsOut dk_in, QkNormGradients gradients) {
  if (s.rows <= 0) return;
  const WorkspaceSize need = backward_workspace(s, gradients.any());
  const WorkspaceParts workspace(c, need);
  if (!workspace) return;
  float* partials = need.shared > 0 ? workspace.shared<float>() : nullptr;
  const int64_t width = round_up(s.head_dim, kStep), size = partial_size(s), block = backward_block_rows(s);
  by_type({dq.data, dk.data, q.data, k.data, dq_in.data, dk_in.data, weights.q_gamma, weights.k_gamma},
          [&](auto type) HWY_ATTR {
            using Heads = HeadArray<decltype(type)>;
            parallel_blocks(c, s.rows, block, [&](int64_t begin, int64_t end, int) HWY_ATTR {
              const BackwardHeads<decltype(type)> queries_and_keys[2] = {
                  {Heads(dq), Heads(q), Heads(dq_in), {weights.q_gamma, weights.q_beta, s.gamma_offset}},
                  {Heads(dk), Heads(k), Heads(dk_in), {weights.k_gamma, weights.k_beta, s.gamma_offset}}};
              float* partial = partials ? partials + begin / block * size : nullptr;
              if (partial) std::memset(partial, 0, static_cast<size_t>(size) * sizeof(float));
              for (int64_t r = begin; r < end; ++r) {
                const Angles rotation = angles_of(s, angles, r, true);
                for_heads(s, [&](auto which, int64_t g, int64_t h) HWY_ATTR {
                  const auto& heads = queries_and_keys[which()];
                  const auto dx = heads.dx.head(r, g, h);
                  rotate(heads.dy.head(r, g, h), dx, s, rotation, heads.in_place);
                  if (s.norm == QkNorm::none) return;
                  float* dgamma = partial ? partial + static_cast<int64_t>(which()) * 2 * width : nullptr;
                  normalize_backward(dx, heads.x.head(r, g, h), s, heads.weights, dgamma,
                                     dgamma ? dgamma + width : nullptr);
                });
              }
            });
          });
  if (partials) add_partials(s, gradients, partials);
}

Rope rope_family() {
  return {.forward = forward, .backward = backward, .backward_workspace = backward_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Rope, rope)
#endif
