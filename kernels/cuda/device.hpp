// The functions of kernel sources. Each `.cu` file is compiled twice: by nvcc for the GPU, and by the host
// compiler for the device `simulated` (kernels/simulated/), where every kernel runs on machines without a GPU
// and its barriers, masks and shared memory are checked. Kernels therefore launch by launch(), declare shared
// memory by CAPSTAN_SHARED and use the functions below in place of CUDA's own.
#pragma once

#ifdef __CUDACC__
#include "kernels/cuda/intrinsics.hpp"
#else
#include "kernels/simulated/intrinsics.hpp"
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <initializer_list>

#include "base/division.hpp"
#include "base/philox.hpp"
#include "tensor/dtype.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// Divisions of unsigned integers take one instruction.
__device__ inline int lane_index() {
  return static_cast<int>(static_cast<uint32_t>(thread_index()) % kWarp);
}
__device__ inline int warp_index() {
  return static_cast<int>(static_cast<uint32_t>(thread_index()) / kWarp);
}
// Index of this thread among all threads of the launch.
__device__ inline int64_t global_thread() {
  return block_index() * block_threads() + thread_index();
}

// ---- reductions, in an order that the shape alone determines

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
// NaN if one of them is.
template <class T = float>
struct Max {
  __device__ T operator()(T a, T b) const {
    if constexpr (std::is_same_v<T, float>)
      return max_or_nan(a, b);
    else
      return a > b ? a : b;
  }
};
// For integers, since NaN is not propagated.
template <class T>
struct Min {
  __device__ T operator()(T a, T b) const { return a < b ? a : b; }
};

template <class T>
__device__ T warp_sum(T value, Location at = {}) {
  return warp_reduce(value, Sum(), kWarp, at);
}

// Joins the values of all threads; all get the result. Every thread of the block calls it.
template <class T, class Join>
__device__ T block_reduce(T value, T identity, const Join& join, Location at = {}) {
  CAPSTAN_SHARED(T, of_warps, kWarp);
  value = warp_reduce(value, join, kWarp, at);
  if (block_threads() == kWarp) return value;
  if (lane_index() == 0) of_warps[warp_index()] = value;
  sync_threads(at);
  value = identity;
  if (lane_index() < block_threads() / kWarp) value = of_warps[lane_index()];
  value = warp_reduce(value, join, kWarp, at);
  // Before the next call writes its values.
  sync_threads(at);
  return value;
}
template <class T>
__device__ T block_sum(T value, Location at = {}) {
  return block_reduce(value, T{}, Sum(), at);
}
__device__ inline float block_max(float value, Location at = {}) {
  return block_reduce(value, -INFINITY, Max(), at);
}

// Replaces each value by its sum over all threads, with the barriers of one reduction.
template <int kCount>
__device__ void block_sums(float (&values)[kCount], Location at = {}) {
  CAPSTAN_SHARED(float, of_warps, kCount* kWarp);
  reduce_lanes(values, Sum(), kWarp, at);
  if (block_threads() == kWarp) return;
  if (lane_index() == 0)
    for (int i = 0; i < kCount; ++i) of_warps[i * kWarp + warp_index()] = values[i];
  sync_threads(at);
  for (int i = 0; i < kCount; ++i)
    values[i] = lane_index() < block_threads() / kWarp ? of_warps[i * kWarp + lane_index()] : 0.0f;
  reduce_lanes(values, Sum(), kWarp, at);
  // Before the next call writes its values.
  sync_threads(at);
}

// Sums of the columns of partial rows: a block of threads has 32 columns. Each warp adds every eighth row,
// and the first one gets the sums of the warps, added in order. `column`: that of this lane, whose rows are
// `stride` apart; null: none.
inline constexpr int kColumnSumThreads = 256;
__device__ inline float column_sum(const float* column, int64_t rows, int64_t stride, Location at = {}) {
  CAPSTAN_SHARED(float, of_warps, kColumnSumThreads);
  float sum = 0;
  if (column)
    for (int64_t row = warp_index(); row < rows; row += kColumnSumThreads / kWarp)
      sum += column[row * stride];
  of_warps[thread_index()] = sum;
  sync_threads(at);
  if (warp_index() != 0) return 0;
  for (int i = lane_index() + kWarp; i < kColumnSumThreads; i += kWarp) sum += of_warps[i];
  return sum;
}

// ---- arrays

// Consecutive elements that a thread processes at a time, as fp32: 16 bytes of the array's type.
template <class T>
struct GroupOf {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
};
// Arrays of mixed types.
struct Any {};
template <>
struct GroupOf<Any> {
  static constexpr int kSize = 4;
};
template <class T>
inline constexpr int kGroup = GroupOf<T>::kSize;

template <int kSize>
struct Group {
  float v[kSize];
  __device__ float& operator[](int i) { return v[i]; }
  __device__ float operator[](int i) const { return v[i]; }
};

// An array whose element type is known at compile time (float, bf16, f16). load() and store() access the
// first `count` elements from i on, by one vector where it is complete and aligned; the others are 0.
template <class T>
struct Array {
  static constexpr int kSize = kGroup<T>;
  T* p;
  __device__ float at(int64_t i) const { return to_float(p[i]); }
  __device__ void put(int64_t i, float value) const { p[i] = from_float<T>(value); }
  __device__ bool is_vector(int64_t i, int64_t count) const {
    return count >= kSize && reinterpret_cast<uintptr_t>(p + i) % 16 == 0;
  }
  // The elements of load() as they are stored.
  __device__ Bytes16 load_bytes(int64_t i, int64_t count) const {
    if (is_vector(i, count)) return load_16(p + i);
    Vector vector = {};
    for (int k = 0; k < kSize; ++k)
      if (k < count) vector.values[k] = p[i + k];
    return std::bit_cast<Bytes16>(vector);
  }
  __device__ Group<kSize> load(int64_t i, int64_t count) const { return unpack(load_bytes(i, count)); }
  __device__ void store(int64_t i, int64_t count, const Group<kSize>& group) const {
    if (is_vector(i, count)) return store_16(p + i, pack(group));
    for (int k = 0; k < kSize; ++k)
      if (k < count) put(i + k, group[k]);
  }
  __host__ __device__ explicit operator bool() const { return p != nullptr; }

  // A group from the 16 bytes of its elements, and back. Elements of 16 bits are converted by pairs, which
  // takes the fewest instructions.
  static __device__ Group<kSize> unpack(const Bytes16& bytes) {
    if constexpr (std::is_same_v<T, float>) {
      return std::bit_cast<Group<kSize>>(bytes);
    } else {
      const auto words = std::bit_cast<Words>(bytes);
      Group<kSize> group;
      for (int k = 0; k < kSize; k += 2) {
        const auto [low, high] = unpack_pair<T>(words.values[k / 2]);
        group[k] = low, group[k + 1] = high;
      }
      return group;
    }
  }
  static __device__ Bytes16 pack(const Group<kSize>& group) {
    if constexpr (std::is_same_v<T, float>) {
      return std::bit_cast<Bytes16>(group);
    } else {
      Words words;
      for (int k = 0; k < kSize; k += 2) words.values[k / 2] = pack_pair<T>(group[k], group[k + 1]);
      return std::bit_cast<Bytes16>(words);
    }
  }

 private:
  struct alignas(16) Vector {
    T values[kSize];
  };
  struct alignas(16) Words {
    uint32_t values[4];
  };
};
template <>
struct Array<Any> {
  static constexpr int kSize = kGroup<Any>;
  void* p;
  DType type;
  // The array from element i on; none where there is none.
  __device__ Array from(int64_t i) const {
    return {p ? static_cast<char*>(p) + i * (type == DType::f32 ? 4 : 2) : nullptr, type};
  }
  __device__ float at(int64_t i) const {
    return type == DType::f32    ? of<float>()[i]
           : type == DType::bf16 ? to_float(of<bf16>()[i])
                                 : to_float(of<f16>()[i]);
  }
  __device__ void put(int64_t i, float value) const {
    if (type == DType::f32)
      of<float>()[i] = value;
    else if (type == DType::bf16)
      of<bf16>()[i] = from_float<bf16>(value);
    else
      of<f16>()[i] = from_float<f16>(value);
  }
  __device__ Group<kSize> load(int64_t i, int64_t count) const { return group<kSize>(i, count); }
  __device__ void store(int64_t i, int64_t count, const Group<kSize>& group) const {
    store_group(i, count, group);
  }
  // `kCount` elements from i on, those from `count` on 0; the type is looked at once, and vectors are loaded
  // where kCount elements consist of them.
  template <int kCount>
  __device__ Group<kCount> group(int64_t i, int64_t count) const {
    Group<kCount> result;
    by_element([&]<class T>(T* values) {
      if constexpr (kCount % kGroup<T> == 0) {
        for (int part = 0; part < kCount; part += kGroup<T>) {
          const auto vector = Array<T>{values}.load(i + part, count - part);
          for (int k = 0; k < kGroup<T>; ++k) result[part + k] = vector[k];
        }
      } else {
        for (int k = 0; k < kCount; ++k) result[k] = k < count ? to_float(values[i + k]) : 0.0f;
      }
    });
    return result;
  }
  // Stores the first `count` elements of a group in the same way.
  template <int kCount>
  __device__ void store_group(int64_t i, int64_t count, const Group<kCount>& group) const {
    by_element([&]<class T>(T* values) {
      if constexpr (kCount % kGroup<T> == 0) {
        for (int part = 0; part < kCount; part += kGroup<T>) {
          Group<kGroup<T>> vector;
          for (int k = 0; k < kGroup<T>; ++k) vector[k] = group[part + k];
          Array<T>{values}.store(i + part, count - part, vector);
        }
      } else {
        for (int k = 0; k < kCount; ++k)
          if (k < count) values[i + k] = from_float<T>(group[k]);
      }
    });
  }
  __host__ __device__ explicit operator bool() const { return p != nullptr; }

 private:
  template <class T>
  __device__ T* of() const {
    return static_cast<T*>(p);
  }
  template <class Body>
  __device__ void by_element(const Body& body) const {
    if (type == DType::f32)
      body(of<float>());
    else if (type == DType::bf16)
      body(of<bf16>());
    else
      body(of<f16>());
  }
};
template <class T>
Array<T> array_of(In x) {
  if constexpr (std::is_same_v<T, Any>)
    return {const_cast<void*>(x.data), x.dtype};
  else
    return {const_cast<T*>(x.as<T>())};
}

// Runs body(T{}) with T = float, bf16 or f16 when all of the given arrays are of that type (absent ones fit
// any), else Any.
template <class Body>
void by_type(std::initializer_list<In> arrays, const Body& body) {
  const auto all = [&](DType type) {
    return std::all_of(arrays.begin(), arrays.end(), [=](const In& x) { return !x || x.dtype == type; });
  };
  if (all(DType::f32))
    body(float{});
  else if (all(DType::bf16))
    body(bf16{});
  else if (all(DType::f16))
    body(f16{});
  else
    body(Any{});
}

// ---- random numbers

// The last block of random words that a thread has drawn: the words of four consecutive elements.
struct RandomBlock {
  uint64_t block = ~uint64_t{0};
  uint32_t words[4] = {};

  // Word of an element. draw(i): words of elements 4 i to 4 i + 3, by philox4x32().
  template <class Draw>
  __device__ uint32_t word_of(uint64_t element, const Draw& draw) {
    if (element / 4 != block) {
      block = element / 4;
      const std::array<uint32_t, 4> next = draw(block);
      for (int i = 0; i < 4; ++i) words[i] = next[static_cast<size_t>(i)];
    }
    // Indexes with constants only, so that the array stays in registers.
    const uint32_t lower = (element & 1) != 0 ? words[1] : words[0],
                   upper = (element & 1) != 0 ? words[3] : words[2];
    return (element & 2) != 0 ? upper : lower;
  }
};
// Words of the kCount elements from `first` on, kCount a multiple of 4. Blocks are not compared for each
// element where `first` is the first one of a block.
template <int kCount>
struct RandomWords {
  uint32_t words[kCount];
  template <class Draw>
  __device__ RandomWords(uint64_t first, const Draw& draw) {
    if (first % 4 == 0) {
      for (int k = 0; k < kCount; k += 4) {
        const std::array<uint32_t, 4> next = draw(first / 4 + static_cast<uint64_t>(k / 4));
        for (int i = 0; i < 4; ++i) words[k + i] = next[static_cast<size_t>(i)];
      }
    } else {
      RandomBlock last;
      CAPSTAN_UNROLL
      for (int k = 0; k < kCount; ++k) words[k] = last.word_of(first + static_cast<uint64_t>(k), draw);
    }
  }
};

// ---- launches

// Threads of a block that works on `elements`, each on kEach at a time.
inline int threads_for(int64_t elements, int64_t each, int most = 256) {
  return static_cast<int>(std::clamp<int64_t>(round_up(ceil_div(elements, each), kWarp), kWarp, most));
}

// op(i, count) for groups of kSize elements, `count` of which are there.
template <int kSize, class Op>
__global__ void map_kernel(Op op, int64_t n) {
  const int64_t i = global_thread() * kSize;
  if (i < n) op(i, n - i);
}
template <int kSize, class Op>
void map(Context& c, int64_t n, const Op& op) {
  constexpr int kThreads = 256;
  launch(c, {ceil_div(n, int64_t{kThreads} * kSize), kThreads}, map_kernel<kSize, Op>, op, n);
}

// *out = the sum of `partial`, to which it adds what is there if `accumulate` is set.
template <class Number>
__global__ void add_partials_kernel(const Number* partial, int64_t count, Number* out, bool accumulate) {
  Number sum = 0;
  for (int64_t i = thread_index(); i < count; i += block_threads()) sum += partial[i];
  sum = block_sum(sum);
  if (thread_index() == 0) *out = (accumulate ? *out : 0) + sum;
}
template <class Number>
void add_partials(Context& c, const Number* partial, int64_t count, Number* out, bool accumulate) {
  launch(c, {1, 256}, add_partials_kernel<Number>, partial, count, out, accumulate);
}

// The first elements of a launch's workspace; null where it was given less, which is reported in the error
// slot.
template <class T>
T* workspace_of(Context& c, WorkspaceSize need, const char* file = __builtin_FILE(),
                const char* function = __builtin_FUNCTION()) {
  if (need.total(0) <= c.workspace.bytes) return reinterpret_cast<T*>(c.workspace.data);
  *c.error = {file, function, need.total(0), c.workspace.bytes};
  return nullptr;
}
// Reports a request that this device cannot meet.
inline void refuse(Context& c, const char* reason, const char* file = __builtin_FILE(),
                   const char* function = __builtin_FUNCTION()) {
  *c.error = {file, function, 0, 0, reason};
}

}  // namespace capstan::kernels::CAPSTAN_GPU
