// RMSNorm across the heads of a token. Bytes in fp32, R elements of packed QKV: squares 4 R, forward 8 R,
// dots 8 R, backward 12 R.
#include "kernels/head_norm.hpp"

#include <cmath>
#include <cstring>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/head_norm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// Calls body(kind, first, count) for the queries, the key and the value of each group of a token's row.
enum class QkvSlice : uint8_t { queries, key, value };
template <class Body>
HWY_INLINE void for_slices(const QkvLayout& qkv, Body&& body) {
  for (int64_t g = 0; g < qkv.groups; ++g) {
    body(QkvSlice::queries, qkv.query(g * qkv.heads_per_group), qkv.heads_per_group * qkv.head_dim);
    body(QkvSlice::key, qkv.key(g), qkv.head_dim);
    body(QkvSlice::value, qkv.value(g), qkv.head_dim);
  }
}

// gamma + gamma_offset in the order of a row (values are not read), fp32.
void arrange_gamma(const HeadNormShape& s, In query_gamma, In key_gamma, float* to) {
  const int64_t size = static_cast<int64_t>(size_of(query_gamma.dtype));
  const auto from = [&](In gamma, int64_t at) {
    return In{static_cast<const std::byte*>(gamma.data) + at * size, gamma.dtype};
  };
  int64_t queries = 0, keys = 0;
  for_slices(s.qkv, [&](QkvSlice slice, int64_t first, int64_t count) {
    if (slice == QkvSlice::value) return;
    int64_t& done = slice == QkvSlice::key ? keys : queries;
    widen(from(slice == QkvSlice::key ? key_gamma : query_gamma, done), to + first, count);
    for (int64_t i = first; i < first + count; ++i) to[i] += s.gamma_offset;
    done += count;
  });
}
struct Pair {
  float queries, keys;
  HWY_INLINE float of(QkvSlice slice) const { return slice == QkvSlice::key ? keys : queries; }
};
HWY_INLINE Pair rstd_of(const HeadNormShape& s, const float* squares) {
  return {1.0f / std::sqrt(squares[0] / static_cast<float>(s.query_cols) + s.eps),
          1.0f / std::sqrt(squares[1] / static_cast<float>(s.key_cols) + s.eps)};
}
// Sums over a row's queries and keys of `term(i)`, `tail(i, n)` for the last elements of a slice.
template <class Term, class Tail>
HWY_INLINE void sum_slices(const HeadNormShape& s, bool counts_keys, float* sums, Term&& term, Tail&& tail) {
  VF queries = hn::Zero(DF()), keys = queries;
  for_slices(s.qkv, [&](QkvSlice slice, int64_t first, int64_t count) HWY_ATTR {
    if (slice == QkvSlice::value) return;
    VF sum = hn::Zero(DF());
    for_vectors(
        count, [&](int64_t i) HWY_ATTR { sum = hn::Add(sum, term(slice, first + i)); },
        [&](int64_t i, int64_t n) HWY_ATTR { sum = hn::Add(sum, tail(slice, first + i, n)); });
    VF& total = slice == QkvSlice::key ? keys : queries;
    total = hn::Add(total, sum);
  });
  sums[0] = sum_lanes(queries);
  sums[1] = counts_keys ? sum_lanes(keys) : 0.0f;
}

void squares(Context& c, HeadNormShape s, In qkv, float* out) {
  const int64_t row = s.qkv.row();
  by_type({qkv}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(qkv);
    parallel_blocks(c, s.rows, rows_per_block(row), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row;
        const auto square = [](VF v) HWY_ATTR { return hn::Mul(v, v); };
        sum_slices(
            s, s.counts_keys, out + 2 * r, [&](QkvSlice, int64_t i) HWY_ATTR { return square(x.at(at + i)); },
            [&](QkvSlice, int64_t i, int64_t n) HWY_ATTR { return square(x.part(at + i, n)); });
      }
    });
  });
}

// gamma for a row of QKV.
WorkspaceSize gamma_workspace(HeadNormShape s) {
  return {static_cast<size_t>(s.qkv.row()) * sizeof(float), 0};
}

void forward(Context& c, HeadNormShape s, In qkv, const float* squares_in, In query_gamma, In key_gamma,
             Out y_out) {
  const int64_t row = s.qkv.row();
  const WorkspaceParts workspace(c, gamma_workspace(s));
  if (!workspace) return;
  auto* gamma = workspace.shared<float>();
  arrange_gamma(s, query_gamma, key_gamma, gamma);
  by_type({qkv, y_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto x = array_of<T>(qkv), y = array_of<T>(y_out);
    parallel_blocks(c, s.rows, rows_per_block(row), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row;
        const Pair rstd = rstd_of(s, squares_in + 2 * r);
        for_slices(s.qkv, [&](QkvSlice slice, int64_t first, int64_t count) HWY_ATTR {
          const int64_t from = at + first;
          if (slice == QkvSlice::value) {
            for_vectors(
                count, [&](int64_t i) HWY_ATTR { y.put(from + i, x.at(from + i)); },
                [&](int64_t i, int64_t n) HWY_ATTR { y.put_part(from + i, x.part(from + i, n), n); });
            return;
          }
          const VF factor = splat(rstd.of(slice));
          const float* g = gamma + first;
          for_vectors(
              count,
              [&](int64_t i)
                  HWY_ATTR { y.put(from + i, hn::Mul(hn::Mul(x.at(from + i), factor), load(g + i))); },
              [&](int64_t i, int64_t n) HWY_ATTR {
                y.put_part(from + i, hn::Mul(hn::Mul(x.part(from + i, n), factor), load_part(g + i, n)), n);
              });
        });
      }
    });
  });
}

void dots(Context& c, HeadNormShape s, In dy_in, In qkv, const float* squares_in, In query_gamma,
          In key_gamma, float* out) {
  const int64_t row = s.qkv.row();
  const WorkspaceParts workspace(c, gamma_workspace(s));
  if (!workspace) return;
  auto* gamma = workspace.shared<float>();
  arrange_gamma(s, query_gamma, key_gamma, gamma);
  by_type({dy_in, qkv}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto dy = array_of<T>(dy_in), x = array_of<T>(qkv);
    parallel_blocks(c, s.rows, rows_per_block(row), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row;
        const Pair rstd = rstd_of(s, squares_in + 2 * r);
        sum_slices(
            s, true, out + 2 * r,
            [&](QkvSlice, int64_t i)
                HWY_ATTR { return hn::Mul(hn::Mul(dy.at(at + i), load(gamma + i)), x.at(at + i)); },
            [&](QkvSlice, int64_t i, int64_t n) HWY_ATTR {
              return hn::Mul(hn::Mul(dy.part(at + i, n), load_part(gamma + i, n)), x.part(at + i, n));
            });
        out[2 * r] *= rstd.queries;
        out[2 * r + 1] *= rstd.keys;
      }
    });
  });
}

// As in norm.cpp: at most 64 partial rows, whose number depends on the shape only.
int64_t gradient_block(const HeadNormShape& s) {
  return std::max(rows_per_block(s.qkv.row()), ceil_div(s.rows, 64));
}
WorkspaceSize backward_workspace(HeadNormShape s, bool parameter_gradients) {
  if (s.rows <= 0) return {};
  const int64_t blocks = parameter_gradients ? ceil_div(s.rows, gradient_block(s)) : 0;
  return {static_cast<size_t>(s.qkv.row() * (1 + blocks)) * sizeof(float), 0};
}

// With xhat = x rstd and h = dy gamma: dx = rstd (h - xhat mean(h xhat)). Only the rank that counts the keys
// subtracts the mean.
void backward(Context& c, HeadNormShape s, In dy_in, In qkv, const float* squares_in, const float* dots_in,
              In query_gamma, In key_gamma, Out dx_out, float* dquery_gamma, float* dkey_gamma) {
  const int64_t row = s.qkv.row();
  if (s.rows <= 0) return;
  const int64_t block = gradient_block(s), blocks = ceil_div(s.rows, block);
  const bool partials = dquery_gamma || dkey_gamma;
  const WorkspaceParts workspace(c, backward_workspace(s, partials));
  if (!workspace) return;
  auto* gamma = workspace.shared<float>();
  float* partial = gamma + row;
  arrange_gamma(s, query_gamma, key_gamma, gamma);
  by_type({dy_in, qkv, dx_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto dy = array_of<T>(dy_in), x = array_of<T>(qkv), dx = array_of<T>(dx_out);
    parallel_blocks(c, s.rows, block, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      float* mine = partial + begin / block * row;
      if (partials) std::memset(mine, 0, static_cast<size_t>(row) * sizeof(float));
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row;
        const Pair rstd = rstd_of(s, squares_in + 2 * r);
        const Pair mean{dots_in[2 * r] / static_cast<float>(s.query_cols),
                        s.counts_keys ? dots_in[2 * r + 1] / static_cast<float>(s.key_cols) : 0.0f};
        for_slices(s.qkv, [&](QkvSlice slice, int64_t first, int64_t count) HWY_ATTR {
          const int64_t from = at + first;
          if (slice == QkvSlice::value) {
            for_vectors(
                count, [&](int64_t i) HWY_ATTR { dx.put(from + i, dy.at(from + i)); },
                [&](int64_t i, int64_t n) HWY_ATTR { dx.put_part(from + i, dy.part(from + i, n), n); });
            return;
          }
          const VF factor = splat(rstd.of(slice)), m = splat(mean.of(slice));
          const float* g = gamma + first;
          float* to = mine + first;
          for_vectors(
              count,
              [&](int64_t i) HWY_ATTR {
                const VF d = dy.at(from + i), hat = hn::Mul(x.at(from + i), factor);
                if (partials) store(hn::MulAdd(d, hat, load(to + i)), to + i);
                dx.put(from + i, hn::Mul(factor, hn::NegMulAdd(hat, m, hn::Mul(d, load(g + i)))));
              },
              [&](int64_t i, int64_t n) HWY_ATTR {
                const VF d = dy.part(from + i, n), hat = hn::Mul(x.part(from + i, n), factor);
                if (partials) store_part(hn::MulAdd(d, hat, load_part(to + i, n)), to + i, n);
                dx.put_part(from + i, hn::Mul(factor, hn::NegMulAdd(hat, m, hn::Mul(d, load_part(g + i, n)))),
                            n);
              });
        });
      }
    });
  });
  if (!partials) return;
  int64_t queries = 0, keys = 0;
  for_slices(s.qkv, [&](QkvSlice slice, int64_t first, int64_t count) {
    if (slice == QkvSlice::value) return;
    int64_t& done = slice == QkvSlice::key ? keys : queries;
    float* to = slice == QkvSlice::key ? dkey_gamma : dquery_gamma;
    for (int64_t i = 0; to && i < count; ++i) {
      float sum = 0;
      for (int64_t b = 0; b < blocks; ++b) sum += partial[b * row + first + i];
      to[done + i] += sum;
    }
    done += count;
  });
}

HeadNorm head_norm_family() {
  return {.squares = squares,
          .forward = forward,
          .dots = dots,
          .backward = backward,
          .forward_workspace = gamma_workspace,
          .dots_workspace = gamma_workspace,
          .backward_workspace = backward_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(HeadNorm, head_norm)
#endif
