// RoPE and QK norm, one warp for each head and one block of threads for consecutive tokens. Bytes moved in
// fp32 for E = heads * head_dim + groups * head_dim elements of a row: forward 8 rows E; backward 8 rows E,
// with a norm 12 rows E (the second read of a head hits the L1 cache). A lane processes both elements of each
// pair that rotates together, so that the output may overwrite the input. Heads without a norm or with
// RMSNorm, whose halves consist of aligned vectors, are rotated by vectors.
#include "kernels/rope.hpp"

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Partial rows of the gradients of the weights, at most.
constexpr int64_t kMaxPartials = 256;

// Queries or keys.
template <class T>
struct HeadArray {
  Array<T> x;
  HeadStrides strides;
};
template <class T>
HeadArray<T> heads_of(const HeadsIn& heads) {
  return {array_of<T>(heads.data), heads.strides};
}
template <class T>
struct NormWeights {
  Array<T> gamma, beta;
  float offset;
  __device__ float factor(int64_t i) const { return gamma.at(i) + offset; }
};

// One head of a row: the queries of each group, then its key, as in packed QKV.
struct HeadIndex {
  int64_t row;
  int group, head;
  bool key;
};
// Divides integers of 32 bits: GPUs take several times as long for those of 64.
__device__ HeadIndex head_index(const RopeShape& s, int64_t row, int index) {
  const int per_group = narrow<int>(s.heads_per_group) + 1, group = index / per_group,
            head = index - group * per_group;
  const bool key = head == s.heads_per_group;
  return {row, group, key ? 0 : head, key};
}
__device__ int heads_of_row(const RopeShape& s) {
  return narrow<int>(s.groups * (s.heads_per_group + 1));
}

// body(i, j, cosine, sine) for the pairs of elements of this lane; the elements that do not rotate come
// alone, as pairs with themselves whose sine is 0.
template <class Body>
__device__ void for_pairs(const RopeShape& s, const RopeAngles& angles, int64_t row, const Body& body) {
  const int64_t half = s.rotary_dim / 2;
  const int64_t at = half > 0 ? int64_t{angles.positions[row]} * half : 0;
  for (int64_t p = lane_index(); p < half; p += kWarp)
    body(s.interleaved ? 2 * p : p, s.interleaved ? 2 * p + 1 : half + p, angles.cos[at + p],
         angles.sin[at + p]);
  for (int64_t i = 2 * half + lane_index(); i < s.head_dim; i += kWarp) body(i, i, 1.0f, 0.0f);
}

struct Statistics {
  float mean, rstd;
};
// Mean and reciprocal standard deviation of a head, computed by all lanes of a warp.
template <class T>
__device__ Statistics statistics_of(const Array<T>& x, int64_t at, const RopeShape& s) {
  const float inverse = 1.0f / static_cast<float>(s.head_dim);
  float mean = 0;
  if (s.norm == QkNorm::layer) {
    for (int64_t i = lane_index(); i < s.head_dim; i += kWarp) mean += x.at(at + i);
    mean = warp_sum(mean) * inverse;
  }
  float squares = 0;
  for (int64_t i = lane_index(); i < s.head_dim; i += kWarp) {
    const float v = x.at(at + i) - mean;
    squares += v * v;
  }
  return {mean, 1.0f / std::sqrt(warp_sum(squares) * inverse + s.eps)};
}

// The cosines and sines of pairs i to i + kSize of a row, whose angles are aligned vectors.
template <int kSize>
__device__ __forceinline__ void load_angles(const RopeAngles& angles, int64_t row, int half, int i,
                                            Group<kSize>& cosine, Group<kSize>& sine) {
  const int64_t at = int64_t{angles.positions[row]} * half + i;
  for (int part = 0; part < kSize; part += 4) {
    const auto c = Array<float>::unpack(load_16(angles.cos + at + part)),
               s = Array<float>::unpack(load_16(angles.sin + at + part));
    for (int k = 0; k < 4; ++k) cosine[part + k] = c[k], sine[part + k] = s[k];
  }
}

// ---- heads without a norm, by vectors

// A chunk of a head: a vector of the first half with that of the second, or one of the elements that do not
// rotate. A thread has the same chunk of several heads, counted in groups and in slots of a group (the
// queries, then the key), without a division for each.
struct HeadStep {
  int groups, slots;
};
template <class T>
struct Rotation {
  int groups, heads_per_group, half, chunks, heads_at_once;
  // heads_at_once, from one head of a thread to the next.
  HeadStep step;
  // By the negative angle, as gradients are: with the halves exchanged.
  bool backward;
  RopeAngles angles;
  HeadArray<T> q, k, q_out, k_out;
};
template <class T>
__global__ void rotate_kernel(Rotation<T> r) {
  constexpr int kSize = kGroup<T>;
  const int chunk = thread_index() % r.chunks, first = thread_index() / r.chunks, rotating = r.half / kSize;
  if (first >= r.heads_at_once) return;
  const int64_t row = block_index();
  const bool rotates = chunk < rotating;
  const int i = (rotates ? chunk : rotating + chunk) * kSize, half = rotates ? r.half : 0;
  const int cosine_at = r.backward ? half : 0, sine_at = half - cosine_at;

  const int slots = r.heads_per_group + 1;
  HeadStep head{first / slots, first % slots};
  T* to;
  Bytes16 lower, upper;
  const auto load = [&] {
    const bool key = head.slots == r.heads_per_group;
    const HeadArray<T>&in = key ? r.k : r.q, &out = key ? r.k_out : r.q_out;
    const int of_group = key ? 0 : head.slots;
    const T* const from = in.x.p + in.strides.at(row, head.groups, of_group) + i;
    to = out.x.p + out.strides.at(row, head.groups, of_group) + i;
    lower = load_16(from + cosine_at), upper = load_16(from + sine_at);
  };
  load();
  Group<kSize> cosine = {}, sine = {};
  if (rotates) load_angles(r.angles, row, r.half, i, cosine, sine);
  while (true) {
    if (rotates) {
      auto a = Array<T>::unpack(lower), b = Array<T>::unpack(upper);
      for (int k = 0; k < kSize; ++k) {
        const float before = a[k];
        a[k] = before * cosine[k] - b[k] * sine[k];
        b[k] = b[k] * cosine[k] + before * sine[k];
      }
      lower = Array<T>::pack(a), upper = Array<T>::pack(b);
      store_16(to + sine_at, upper);
    }
    store_16(to + cosine_at, lower);
    head.groups += r.step.groups, head.slots += r.step.slots;
    if (head.slots >= slots) ++head.groups, head.slots -= slots;
    if (head.groups >= r.groups) return;
    load();
  }
}

template <class T>
bool has_vectors(const HeadArray<T>& heads) {
  const auto divides = [](int64_t value) { return value % kGroup<T> == 0; };
  return reinterpret_cast<uintptr_t>(heads.x.p) % 16 == 0 && divides(heads.strides.token) &&
         divides(heads.strides.group) && divides(heads.strides.head);
}
bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}
// Whether these heads can be processed by vectors: halves consist of them.
template <class T>
bool by_vectors(const RopeShape& s, const RopeAngles& angles,
                std::initializer_list<const HeadArray<T>*> heads) {
  const int64_t half = s.rotary_dim / 2, size = kGroup<T>;
  return !s.interleaved && half % size == 0 && s.head_dim % size == 0 && s.head_dim > 0 &&
         is_aligned(angles.cos) && is_aligned(angles.sin) &&
         std::all_of(heads.begin(), heads.end(), [](const auto* array) { return has_vectors(*array); });
}
// Whether it launches the rotation by vectors.
template <class T>
bool rotate(Context& c, const RopeShape& s, const RopeAngles& angles, bool backward, const HeadArray<T>& q,
            const HeadArray<T>& k, const HeadArray<T>& q_out, const HeadArray<T>& k_out) {
  if (s.norm != QkNorm::none || !by_vectors<T>(s, angles, {&q, &k, &q_out, &k_out})) return false;
  const int64_t half = s.rotary_dim / 2, size = kGroup<T>;
  constexpr int kMostThreads = 512;
  const int64_t chunks = (s.head_dim - half) / size, slots = s.heads_per_group + 1, heads = s.groups * slots;
  if (chunks > kMostThreads) return false;
  // As many heads at once as fit, equally many each time.
  const int64_t times = ceil_div(heads, kMostThreads / chunks), at_once = ceil_div(heads, times);
  const Rotation<T> rotation{narrow<int>(s.groups),
                             narrow<int>(s.heads_per_group),
                             narrow<int>(half),
                             narrow<int>(chunks),
                             narrow<int>(at_once),
                             {narrow<int>(at_once / slots), narrow<int>(at_once % slots)},
                             backward,
                             angles,
                             q,
                             k,
                             q_out,
                             k_out};
  launch(c, {s.rows, threads_for(at_once * chunks, 1, kMostThreads)}, rotate_kernel<T>, rotation);
  return true;
}

// ---- heads with RMSNorm, by vectors

// A thread has the same chunk of the same head in each row of its block. The lanes of a head, which stand
// together, add their sums.
constexpr int kNormedThreads = 640;
template <class T>
struct NormedRotation {
  int slots = 0, heads = 0, head_dim = 0, half = 0, chunks = 0;
  // All rows, and those of a block.
  int64_t rows = 0, block = 0;
  float eps = 0, offset = 0;
  RopeAngles angles = {};
  HeadArray<T> q = {}, k = {}, q_out = {}, k_out = {};
  // Backward: the gradients of the rotated heads; q_out and k_out are then those of q and k.
  HeadArray<T> dq = {}, dk = {};
  Array<T> q_gamma = {}, k_gamma = {};
  // As of RopeBackward.
  float* partials = nullptr;
};
template <class T, bool kBackward>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kNormedThreads, 1) rotate_normed_kernel(NormedRotation<T> r) {
  // Gradients of gamma: [heads, head_dim]
  CAPSTAN_DYNAMIC_SHARED(float, sums);
  constexpr int kSize = kGroup<T>;
  // Elements i to i + kSize of a head, and those half a rotation further.
  struct Chunk {
    Group<kSize> a, b;
  };
  const int chunk = thread_index() % r.chunks, head = thread_index() / r.chunks, group = head / r.slots,
            slot = head % r.slots, rotating = r.half / kSize;
  const bool there = head < r.heads, key = slot == r.slots - 1, rotates = chunk < rotating;
  const int i = (rotates ? chunk : rotating + chunk) * kSize;
  const auto load_chunk = [&](const T* from) {
    Chunk x = {};
    if (there) x.a = Array<T>::unpack(load_16(from + i));
    if (there && rotates) x.b = Array<T>::unpack(load_16(from + i + r.half));
    return x;
  };
  const auto of_head = [&](const HeadArray<T>& heads, int64_t row) {
    return heads.x.p + heads.strides.at(row, group, key ? 0 : slot);
  };
  Chunk factor = load_chunk((key ? r.k_gamma : r.q_gamma).p);
  for (int k = 0; k < kSize; ++k) factor.a[k] += r.offset, factor.b[k] += r.offset;
  const float inverse = 1.0f / static_cast<float>(r.head_dim);
  Chunk gradient = {};

  const int64_t begin = block_index() * r.block, end = r.rows < begin + r.block ? r.rows : begin + r.block;
  for (int64_t row = begin; row < end; ++row) {
    const Chunk x = load_chunk(of_head(key ? r.k : r.q, row));
    Chunk y;
    if constexpr (kBackward) y = load_chunk(of_head(key ? r.dk : r.dq, row));
    Group<kSize> cosine, sine = {};
    for (int k = 0; k < kSize; ++k) cosine[k] = 1;
    if (rotates) load_angles(r.angles, row, r.half, i, cosine, sine);
    float squares = 0;
    for (int k = 0; k < kSize; ++k) squares += x.a[k] * x.a[k] + x.b[k] * x.b[k];
    const float rstd = 1.0f / std::sqrt(warp_reduce(squares, Sum(), r.chunks) * inverse + r.eps);
    if constexpr (kBackward) {
      float sum = 0;
      for (int k = 0; k < kSize; ++k) {
        const float a = y.a[k] * cosine[k] + y.b[k] * sine[k], b = y.b[k] * cosine[k] - y.a[k] * sine[k],
                    hat_a = x.a[k] * rstd, hat_b = x.b[k] * rstd;
        gradient.a[k] += a * hat_a, gradient.b[k] += b * hat_b;
        y.a[k] = a * factor.a[k], y.b[k] = b * factor.b[k];
        sum += y.a[k] * hat_a + y.b[k] * hat_b;
      }
      const float mean = warp_reduce(sum, Sum(), r.chunks) * inverse;
      for (int k = 0; k < kSize; ++k) {
        y.a[k] = rstd * (y.a[k] - x.a[k] * rstd * mean);
        y.b[k] = rstd * (y.b[k] - x.b[k] * rstd * mean);
      }
    } else {
      for (int k = 0; k < kSize; ++k) {
        const float a = x.a[k] * rstd * factor.a[k], b = x.b[k] * rstd * factor.b[k];
        y.a[k] = a * cosine[k] - b * sine[k];
        y.b[k] = b * cosine[k] + a * sine[k];
      }
    }
    if (!there) continue;
    T* const to = of_head(key ? r.k_out : r.q_out, row) + i;
    store_16(to, Array<T>::pack(y.a));
    if (rotates) store_16(to + r.half, Array<T>::pack(y.b));
  }
  if (!kBackward || !r.partials) return;
  if (there)
    for (int k = 0; k < kSize; ++k) {
      sums[head * r.head_dim + i + k] = gradient.a[k];
      if (rotates) sums[head * r.head_dim + i + r.half + k] = gradient.b[k];
    }
  sync_threads();
  for (int j = thread_index(); j < 4 * r.head_dim; j += block_threads()) {
    const int which = j / r.head_dim;
    float sum = 0;
    if (which % 2 == 0)
      for (int h = 0; h < r.heads; ++h)
        if ((h % r.slots == r.slots - 1) == (which == 2)) sum += sums[h * r.head_dim + j % r.head_dim];
    r.partials[block_index() * 4 * r.head_dim + j] = sum;
  }
}
// Whether it launches the rotation of heads with RMSNorm by vectors. Without dq: forward.
template <class T>
bool rotate_normed(Context& c, const RopeShape& s, NormedRotation<T> r) {
  const bool backward = static_cast<bool>(r.dq.x);
  const int64_t half = s.rotary_dim / 2, chunks = (s.head_dim - half) / kGroup<T>,
                heads = s.groups * (s.heads_per_group + 1);
  if (s.norm != QkNorm::rms || !by_vectors<T>(s, r.angles, {&r.q, &r.k, &r.q_out, &r.k_out}) ||
      (backward && !by_vectors<T>(s, r.angles, {&r.dq, &r.dk})) || !is_aligned(r.q_gamma.p) ||
      !is_aligned(r.k_gamma.p) || kWarp % chunks != 0 || heads * chunks > kNormedThreads)
    return false;
  r.slots = narrow<int>(s.heads_per_group + 1), r.heads = narrow<int>(heads),
  r.head_dim = narrow<int>(s.head_dim), r.half = narrow<int>(half), r.chunks = narrow<int>(chunks);
  r.rows = s.rows, r.eps = s.eps, r.offset = s.gamma_offset;
  const size_t shared = r.partials ? sizeof(float) * static_cast<size_t>(heads * s.head_dim) : 0;
  launch(c, {ceil_div(s.rows, r.block), threads_for(heads * chunks, 1, kNormedThreads), shared},
         backward ? rotate_normed_kernel<T, true> : rotate_normed_kernel<T, false>, r);
  return true;
}

// ---- forward

template <class T>
struct RopeForward {
  RopeShape s;
  RopeAngles angles;
  HeadArray<T> q, k, q_out, k_out;
  NormWeights<T> q_weights, k_weights;
};
template <class T>
__global__ void rope_forward_kernel(RopeForward<T> f) {
  const RopeShape& s = f.s;
  for (int head = warp_index(); head < heads_of_row(s); head += block_threads() / kWarp) {
    const HeadIndex p = head_index(s, block_index(), head);
    const HeadArray<T>&in = p.key ? f.k : f.q, &out = p.key ? f.k_out : f.q_out;
    const NormWeights<T>& weights = p.key ? f.k_weights : f.q_weights;
    const int64_t from = in.strides.at(p.row, p.group, p.head), to = out.strides.at(p.row, p.group, p.head);
    Statistics statistics{0, 1};
    if (s.norm != QkNorm::none) statistics = statistics_of(in.x, from, s);
    const auto value = [&](int64_t i) {
      const float x = in.x.at(from + i);
      if (s.norm == QkNorm::none) return x;
      const float scaled = (x - statistics.mean) * statistics.rstd * weights.factor(i);
      return weights.beta ? scaled + weights.beta.at(i) : scaled;
    };
    for_pairs(s, f.angles, p.row, [&](int64_t i, int64_t j, float cosine, float sine) {
      const float a = value(i), b = value(j);
      out.x.put(to + i, a * cosine - b * sine);
      if (j != i) out.x.put(to + j, b * cosine + a * sine);
    });
  }
}

int threads_for_heads(const RopeShape& s) {
  return threads_for(s.groups * (s.heads_per_group + 1) * kWarp, 1);
}
void forward(Context& c, RopeShape s, HeadsIn q, HeadsIn k, RopeAngles angles, QkNormWeights weights,
             HeadsOut q_out, HeadsOut k_out) {
  by_type({q.data, k.data, q_out.data, k_out.data, weights.q_gamma, weights.q_beta, weights.k_gamma,
           weights.k_beta},
          [&](auto type) {
            using T = decltype(type);
            if constexpr (!std::is_same_v<T, Any>) {
              if (rotate(c, s, angles, false, heads_of<T>(q), heads_of<T>(k), heads_of<T>(q_out),
                         heads_of<T>(k_out)))
                return;
              // A few rows for each block, whose threads read gamma once.
              if (rotate_normed<T>(c, s,
                                   {.block = std::max<int64_t>(1, s.rows / (8 * kMaxPartials)),
                                    .angles = angles,
                                    .q = heads_of<T>(q),
                                    .k = heads_of<T>(k),
                                    .q_out = heads_of<T>(q_out),
                                    .k_out = heads_of<T>(k_out),
                                    .q_gamma = array_of<T>(weights.q_gamma),
                                    .k_gamma = array_of<T>(weights.k_gamma)}))
                return;
            }
            const RopeForward<T> f{
                s,
                angles,
                heads_of<T>(q),
                heads_of<T>(k),
                heads_of<T>(q_out),
                heads_of<T>(k_out),
                {array_of<T>(weights.q_gamma), array_of<T>(weights.q_beta), s.gamma_offset},
                {array_of<T>(weights.k_gamma), array_of<T>(weights.k_beta), s.gamma_offset}};
            launch(c, {s.rows, threads_for_heads(s)}, rope_forward_kernel<T>, f);
          });
}

// ---- backward, with the formula of norm.cu

template <class T>
struct RopeBackward {
  RopeShape s;
  RopeAngles angles;
  HeadArray<T> dq, dk, q, k, dq_in, dk_in;
  NormWeights<T> q_weights, k_weights;
  // Rows per block of threads.
  int64_t block;
  // [blocks, 4, head_dim]: gamma and beta of queries, then of keys. Null: not wanted.
  float* partials;
};

template <class T>
__device__ void backward_of_head(const RopeBackward<T>& b, const HeadIndex& p, const Shared<float>& sums,
                                 int64_t sums_at) {
  const RopeShape& s = b.s;
  const HeadArray<T>&dy = p.key ? b.dk : b.dq, &in = p.key ? b.k : b.q, &dx = p.key ? b.dk_in : b.dq_in;
  const NormWeights<T>& weights = p.key ? b.k_weights : b.q_weights;
  const int64_t from = dy.strides.at(p.row, p.group, p.head), to = dx.strides.at(p.row, p.group, p.head),
                at = in.strides.at(p.row, p.group, p.head);
  // body(i, gradient before the rotation) for the elements of this lane, by pairs.
  const auto for_elements = [&](const auto& body) {
    for_pairs(s, b.angles, p.row, [&](int64_t i, int64_t j, float cosine, float sine) {
      const float a = dy.x.at(from + i), c = dy.x.at(from + j);
      body(i, a * cosine + c * sine);
      if (j != i) body(j, c * cosine - a * sine);
    });
  };
  if (s.norm == QkNorm::none)
    return for_pairs(s, b.angles, p.row, [&](int64_t i, int64_t j, float cosine, float sine) {
      const float a = dy.x.at(from + i), c = dy.x.at(from + j);
      dx.x.put(to + i, a * cosine + c * sine);
      if (j != i) dx.x.put(to + j, c * cosine - a * sine);
    });

  const Statistics statistics = statistics_of(in.x, at, s);
  const auto hat = [&](int64_t i) { return (in.x.at(at + i) - statistics.mean) * statistics.rstd; };
  float sum_h = 0, sum_hx = 0;
  for_elements([&](int64_t i, float d) {
    const float xhat = hat(i), h = d * weights.factor(i);
    sum_h += h;
    sum_hx += h * xhat;
    if (!b.partials) return;
    sums[sums_at + i] += d * xhat;
    sums[sums_at + s.head_dim + i] += d;
  });
  const float inverse = 1.0f / static_cast<float>(s.head_dim);
  const float mean_h = s.norm == QkNorm::layer ? warp_sum(sum_h) * inverse : 0.0f;
  const float mean_hx = warp_sum(sum_hx) * inverse;
  // Both elements of a pair are read before one of them is written.
  for_pairs(s, b.angles, p.row, [&](int64_t i, int64_t j, float cosine, float sine) {
    const float a = dy.x.at(from + i), c = dy.x.at(from + j);
    const auto gradient = [&](int64_t e, float d) {
      return statistics.rstd * (d * weights.factor(e) - mean_h - hat(e) * mean_hx);
    };
    dx.x.put(to + i, gradient(i, a * cosine + c * sine));
    if (j != i) dx.x.put(to + j, gradient(j, c * cosine - a * sine));
  });
}

template <class T>
__global__ void rope_backward_kernel(RopeBackward<T> b) {
  // [warps, 4, head_dim]
  CAPSTAN_DYNAMIC_SHARED(float, sums);
  const RopeShape& s = b.s;
  const int warps = block_threads() / kWarp;
  const int64_t of_warp = 4 * s.head_dim, mine = warp_index() * of_warp;
  if (b.partials) {
    for (int64_t i = lane_index(); i < of_warp; i += kWarp) sums[mine + i] = 0.0f;
    sync_warp();
  }
  const int64_t begin = block_index() * b.block, end = s.rows < begin + b.block ? s.rows : begin + b.block;
  for (int64_t row = begin; row < end; ++row)
    for (int head = warp_index(); head < heads_of_row(s); head += warps) {
      const HeadIndex p = head_index(s, row, head);
      backward_of_head(b, p, sums, mine + (p.key ? 2 * s.head_dim : 0));
    }
  if (!b.partials) return;
  sync_threads();
  for (int64_t i = thread_index(); i < of_warp; i += block_threads()) {
    float sum = 0;
    for (int warp = 0; warp < warps; ++warp) sum += sums[warp * of_warp + i];
    b.partials[block_index() * of_warp + i] = sum;
  }
}

// The gradients += the sums of their partial rows.
__global__ void add_rope_partials_kernel(const float* partials, int64_t blocks, int64_t head_dim,
                                         QkNormGradients gradients) {
  const int64_t i = block_index() * kWarp + lane_index(), which = i / head_dim;
  float* const to = which == 0   ? gradients.q_gamma
                    : which == 1 ? gradients.q_beta
                    : which == 2 ? gradients.k_gamma
                    : which == 3 ? gradients.k_beta
                                 : nullptr;
  const float sum = column_sum(to ? partials + i : nullptr, blocks, 4 * head_dim);
  if (to && warp_index() == 0) to[i % head_dim] += sum;
}

int64_t backward_block(const RopeShape& s) {
  return std::max<int64_t>(1, ceil_div(s.rows, kMaxPartials));
}
WorkspaceSize backward_workspace(RopeShape s, bool weight_gradients) {
  if (!weight_gradients || s.norm == QkNorm::none || s.rows <= 0) return {};
  const int64_t blocks = ceil_div(s.rows, backward_block(s));
  return {static_cast<size_t>(blocks * 4 * s.head_dim) * sizeof(float), 0};
}
void backward(Context& c, RopeShape s, HeadsIn dq, HeadsIn dk, HeadsIn q, HeadsIn k, RopeAngles angles,
              QkNormWeights weights, HeadsOut dq_in, HeadsOut dk_in, QkNormGradients gradients) {
  if (s.rows <= 0) return;
  const WorkspaceSize need = backward_workspace(s, gradients.any());
  const bool partial = need.shared > 0;
  auto* partials = partial ? workspace_of<float>(c, need) : nullptr;
  if (partial && !partials) return;
  const int threads = threads_for_heads(s);
  const int64_t shared = partial ? threads / kWarp * 4 * s.head_dim * static_cast<int64_t>(sizeof(float)) : 0;
  // A block's sums of these gradients, for each of its warps.
  if (shared > static_cast<int64_t>(most_shared_bytes()))
    return refuse(c, "the gradients of QK norm weights of such large heads do not fit into shared memory");
  const int64_t block = partial ? backward_block(s) : 1, blocks = ceil_div(s.rows, block);
  by_type({dq.data, dk.data, q.data, k.data, dq_in.data, dk_in.data, weights.q_gamma, weights.k_gamma},
          [&](auto type) {
            using T = decltype(type);
            if constexpr (!std::is_same_v<T, Any>) {
              if (rotate(c, s, angles, true, heads_of<T>(dq), heads_of<T>(dk), heads_of<T>(dq_in),
                         heads_of<T>(dk_in)))
                return;
              if (rotate_normed<T>(c, s,
                                   {.block = block,
                                    .angles = angles,
                                    .q = heads_of<T>(q),
                                    .k = heads_of<T>(k),
                                    .q_out = heads_of<T>(dq_in),
                                    .k_out = heads_of<T>(dk_in),
                                    .dq = heads_of<T>(dq),
                                    .dk = heads_of<T>(dk),
                                    .q_gamma = array_of<T>(weights.q_gamma),
                                    .k_gamma = array_of<T>(weights.k_gamma),
                                    .partials = partials}))
                return;
            }
            const RopeBackward<T> b{s,
                                    angles,
                                    heads_of<T>(dq),
                                    heads_of<T>(dk),
                                    heads_of<T>(q),
                                    heads_of<T>(k),
                                    heads_of<T>(dq_in),
                                    heads_of<T>(dk_in),
                                    {array_of<T>(weights.q_gamma), Array<T>{}, s.gamma_offset},
                                    {array_of<T>(weights.k_gamma), Array<T>{}, s.gamma_offset},
                                    block,
                                    partials};
            launch(c, {blocks, threads, static_cast<size_t>(shared)}, rope_backward_kernel<T>, b);
          });
  if (partial)
    launch(c, {ceil_div(4 * s.head_dim, int64_t{kWarp}), kColumnSumThreads}, add_rope_partials_kernel,
           static_cast<const float*>(partials), blocks, s.head_dim, gradients);
}

}  // namespace

const Rope& rope_family() {
  static const Rope family{
      .forward = forward, .backward = backward, .backward_workspace = backward_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
