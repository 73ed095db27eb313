// CUDA's words for the host compiler: what kernels/cuda/intrinsics.hpp offers to nvcc, with the same names.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/simulated/block.hpp"
#include "kernels/simulated/enqueue.hpp"
#include "kernels/simulated/matrices.hpp"
#include "kernels/simulated/overflow.hpp"
#include "kernels/simulated/sample.hpp"
#include "tensor/dtype.hpp"
#include "tensor/float8.hpp"
#include "tensor/kernel_context.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
// The namespace of all that is compiled for this device.
#define CAPSTAN_GPU simulated

#define CAPSTAN_UNROLL
#define CAPSTAN_UNROLL_TWICE
#define CAPSTAN_LAUNCH_BOUNDS(threads, blocks)
#define CAPSTAN_KERNEL_PARAMETER

// `name`: count elements of shared memory.
#define CAPSTAN_SHARED(T, name, count)                                                                 \
  static constexpr ::capstan::kernels::simulated::SharedSite name##_site{#name, {__FILE__, __LINE__}}; \
  const ::capstan::kernels::simulated::Shared<T> name(                                                 \
      ::capstan::kernels::simulated::running_block->shared(name##_site, count, sizeof(T)))
// `name`: the shared memory of Grid::shared_bytes.
#define CAPSTAN_DYNAMIC_SHARED(T, name)                                                                \
  static constexpr ::capstan::kernels::simulated::SharedSite name##_site{#name, {__FILE__, __LINE__}}; \
  const ::capstan::kernels::simulated::Shared<T> name(                                                 \
      ::capstan::kernels::simulated::running_block->dynamic_shared(name##_site, sizeof(T)))

namespace capstan::kernels::simulated {

// ---- threads and blocks

inline int thread_index() {
  return running_block->thread();
}
inline int block_threads() {
  return running_block->threads();
}
inline int64_t block_index() {
  return running_block->index();
}
inline int64_t grid_blocks() {
  return running_block->blocks();
}
// Blocks of a grid that loops over work whose amount only device memory has. Here each of them takes time
// without any work, and with few of them small tests have blocks that loop. A sample needs those of a GPU, so
// that a block has no more work than there.
inline int64_t looping_blocks(int64_t on_gpu) {
  return current_sample() ? on_gpu : std::min<int64_t>(on_gpu, 4);
}

// An index or a size as a smaller type. Errors: it does not fit.
template <class To>
To narrow(int64_t value, Location at = {}) {
  if (!std::in_range<To>(value)) [[unlikely]]
    report_narrowing(value, sizeof(To), at);
  return static_cast<To>(value);
}

// ---- barriers and warps

inline void sync_threads(Location at = {}) {
  running_block->synchronize(at);
}
inline void sync_warp(uint32_t mask = kAllLanes, Location at = {}) {
  running_block->synchronize_warp(at, mask);
}

// The lane whose value `source(lane)` names.
template <class T, class Source>
T exchange_lanes(T value, uint32_t mask, Location at, Source&& source) {
  return running_block->exchange(at, mask, value, [&](T* values) {
    T results[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      const int from = source(lane);
      if ((mask >> from & 1) == 0)
        running_block->report(at, "lane " + std::to_string(lane) + " reads the value of lane " +
                                      std::to_string(from) + ", which the mask does not name");
      results[lane] = values[from];
    }
    for (int lane = 0; lane < kWarp; ++lane)
      if ((mask >> lane & 1) != 0) values[lane] = results[lane];
  });
}
template <class T>
T shuffle(T value, int lane, uint32_t mask = kAllLanes, Location at = {}) {
  // Each lane asks for its own: the sources are exchanged as well.
  struct Request {
    T value;
    int lane;
  };
  const Request result = running_block->exchange(at, mask, Request{value, lane}, [&](Request* requests) {
    T values[kWarp];
    for (int i = 0; i < kWarp; ++i) values[i] = requests[i].value;
    for (int i = 0; i < kWarp; ++i) {
      if ((mask >> i & 1) == 0) continue;
      const int from = requests[i].lane & (kWarp - 1);
      if ((mask >> from & 1) == 0)
        running_block->report(at, "lane " + std::to_string(i) + " reads the value of lane " +
                                      std::to_string(from) + ", which the mask does not name");
      requests[i].value = values[from];
    }
  });
  return result.value;
}
template <class T>
T shuffle_xor(T value, int lane_mask, uint32_t mask = kAllLanes, Location at = {}) {
  return exchange_lanes(value, mask, at, [=](int lane) { return lane ^ lane_mask; });
}
template <class T>
T shuffle_up(T value, int distance, uint32_t mask = kAllLanes, Location at = {}) {
  return exchange_lanes(value, mask, at, [=](int lane) { return lane < distance ? lane : lane - distance; });
}
inline uint32_t ballot(bool predicate, uint32_t mask = kAllLanes, Location at = {}) {
  return running_block->exchange(at, mask, static_cast<uint32_t>(predicate), [&](uint32_t* values) {
    uint32_t bits = 0;
    for (int lane = 0; lane < kWarp; ++lane)
      if ((mask >> lane & 1) != 0 && values[lane] != 0) bits |= uint32_t{1} << lane;
    std::fill_n(values, kWarp, bits);
  });
}
// Reduces the values of all lanes as five butterfly shuffles do, with one wait instead of five; the result
// has the bits of a GPU. `lanes`: size of each reduced group, a power of two.
template <class T, class Join>
T warp_reduce(T value, Join&& join, int lanes = kWarp, Location at = {}) {
  return running_block->exchange(at, kAllLanes, value, [&](T* values) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      T next[kWarp];
      for (int lane = 0; lane < kWarp; ++lane) next[lane] = join(values[lane], values[lane ^ distance]);
      std::copy_n(next, kWarp, values);
    }
  });
}

// Reduces each of the values over groups of `lanes` lanes, with one wait for all. lanes: a power of two.
template <int kCount, class T, class Join>
void reduce_lanes(T (&values)[kCount], Join&& join, int lanes, Location at = {}) {
  T* mine = values;
  running_block->exchange(at, kAllLanes, mine, [&](T** all) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      for (int i = 0; i < kCount; ++i) {
        T next[kWarp];
        for (int lane = 0; lane < kWarp; ++lane) next[lane] = join(all[lane][i], all[lane ^ distance][i]);
        for (int lane = 0; lane < kWarp; ++lane) all[lane][i] = next[lane];
      }
  });
}

// ---- memory

inline void check_alignment(const void* p, Location at, size_t bytes = 16) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0)
    running_block->report(at, "a vector of " + std::to_string(bytes) + " bytes is not aligned to its size");
}
inline Bytes16 load_16(const void* p, Location at = {}) {
  check_alignment(p, at);
  Bytes16 result;
  std::memcpy(&result, p, 16);
  return result;
}
inline void store_16(void* p, const Bytes16& value, Location at = {}) {
  check_alignment(p, at);
  std::memcpy(p, &value, 16);
}
// Stores 4 bytes at an address that is a multiple of 4.
inline void store_4(void* p, uint32_t value, Location at = {}) {
  check_alignment(p, at, 4);
  std::memcpy(p, &value, 4);
}

// 16 bytes of shared memory, from an element on that lies at a multiple of 16.
template <class T>
Bytes16 load_16(const Shared<T>& from, int64_t first, Location at = {}) {
  for (int64_t k = 0; k < static_cast<int64_t>(16 / sizeof(T)); ++k)
    read_shared(from.array(), Index(first + k, at));
  return load_16(from.data() + first, at);
}
template <class T>
void store_16(const Shared<T>& to, int64_t first, const Bytes16& value, Location at = {}) {
  for (int64_t k = 0; k < static_cast<int64_t>(16 / sizeof(T)); ++k)
    write_shared(to.array(), Index(first + k, at));
  store_16(to.data() + first, value, at);
}
// kBytes (2, 4, 8 or 16) of words, the lowest byte first, to an address that is a multiple of kBytes.
template <int kBytes>
void store_words(void* p, const uint32_t* words, Location at = {}) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  check_alignment(p, at, kBytes);
  std::memcpy(p, words, kBytes);
}
// *target = max(*target, value): the same in every order of threads.
inline void atomic_max(uint32_t* target, uint32_t value) {
  const std::atomic_ref<uint32_t> shared(*target);
  uint32_t before = shared.load(std::memory_order_relaxed);
  while (before < value && !shared.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

// *target += value: integers have the same sum in every order of threads.
inline void atomic_add(uint64_t* target, uint64_t value) {
  std::atomic_ref<uint64_t>(*target).fetch_add(value, std::memory_order_relaxed);
}

// Starts an asynchronous copy of kBytes (4, 8 or 16) to the elements of shared memory from `first` on, both
// aligned to that size.
template <int kBytes, class T>
void copy_async(const Shared<T>& to, int64_t first, const T* from, Location at = {}) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  running_block->start_copy(to.array(), first, from, kBytes, kBytes, at);
}
// As copy_async; copies the first `bytes` of kBytes and writes zeros after them.
template <int kBytes, class T>
void copy_part_async(const Shared<T>& to, int64_t first, const T* from, int bytes, Location at = {}) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  running_block->start_copy(to.array(), first, from, kBytes, bytes, at);
}
// As copy_async of 16 bytes if `there`; otherwise reads nothing and writes zeros.
inline void copy_async_if(bool there, const Shared<Bytes16>& to, int64_t first, const Bytes16* from,
                          Location at = {}) {
  running_block->start_copy(to.array(), first, from, 16, there ? 16 : 0, at);
}
// Ends a group of copies.
inline void commit_copies() {
  running_block->commit_copies();
}
// Waits for all groups of this thread but the kPending latest. Other threads see them after a barrier.
template <int kPending>
void wait_for_copies() {
  running_block->wait_for_copies(kPending);
}

// ---- tensor cores: kernels/cuda/intrinsics.hpp says which elements a lane has

// Loads groups of four 8 x 8 matrices (ldmatrix). Lane l gives the index in shared memory of row l % 8 of
// matrix l / 8 of each group. kTransposed: lanes get the elements of the transposed matrices.
template <bool kTransposed, int kCount>
void load_matrices(uint32_t (&to)[kCount][4], const Shared<Bytes16>& from, const int (&rows)[kCount],
                   Location at = {}) {
  struct Request {
    uint32_t (*to)[4];
    const int* rows;
  };
  const Request mine{to, rows};
  const Request* lane = &mine;
  running_block->exchange(at, kAllLanes, lane, [&](const Request** lanes) {
    for (int i = 0; i < kCount; ++i)
      for (int matrix = 0; matrix < 4; ++matrix) {
        Bytes16 values[8];
        for (int row = 0; row < 8; ++row) values[row] = from[{lanes[8 * matrix + row]->rows[i], at}];
        for (int to_lane = 0; to_lane < kWarp; ++to_lane)
          lanes[to_lane]->to[i][matrix] = pair_of_matrix<kTransposed>(values, to_lane);
      }
  });
}
// From one index in swizzled shared memory to another one: (index ^ flip) + offset, where flip < 8.
struct SwizzledStep {
  int flip, offset;
};
// As above; lane l gives one index, from which constant steps lead to its row in each group.
template <bool kTransposed, int kCount>
void load_matrices(uint32_t (&to)[kCount][4], const Shared<Bytes16>& from, int row,
                   const SwizzledStep (&steps)[kCount], Location at = {}) {
  int rows[kCount];
  for (int i = 0; i < kCount; ++i) rows[i] = (row ^ steps[i].flip) + steps[i].offset;
  load_matrices<kTransposed>(to, from, rows, at);
}
// accumulators[m][first + n] += a[m] b[n] for kM A fragments and for B fragments of 16 x 16, which are two of
// 16 x 8. Values are the sums of kTerms terms, the largest first (kernels/cuda/bf16x3.hpp): all fragments of
// the first term, then those of the second. Products of terms i and j with i + j >= kTerms are left out.
template <class T, int kTerms, int kM, int kAccumulators, int kA, int kB>
void multiply_add(float (&accumulators)[kM][kAccumulators][4], int first, const uint32_t (&a)[kA][4],
                  const uint32_t (&b)[kB][4], Location at = {}) {
  static_assert(kA == kTerms * kM && kB % kTerms == 0);
  const MatrixOperands mine{&accumulators[0][first][0], kAccumulators * 4, &a[0][0], &b[0][0]};
  const MatrixOperands* lane = &mine;
  running_block->exchange(at, kAllLanes, lane, [&](const MatrixOperands** lanes) {
    multiply_matrices<T>(lanes, kTerms, kM, kB / kTerms);
  });
}

// ---- functions and conversions

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
// The larger value; NaN if one of them is.
inline float max_or_nan(float a, float b) {
  return a > b || a != a ? a : b;
}
inline float reciprocal_fast(float x) {
  return 1.0f / x;
}
// Two values as T in one register, `low` in its lower half.
template <class T>
uint32_t pack_pair(float low, float high) {
  return static_cast<uint32_t>(T(high).bits) << 16 | T(low).bits;
}
struct FloatPair {
  float low, high;
};
// The values of pack_pair().
template <class T>
FloatPair unpack_pair(uint32_t pair) {
  T low, high;
  low.bits = static_cast<uint16_t>(pair), high.bits = static_cast<uint16_t>(pair >> 16);
  return {static_cast<float>(low), static_cast<float>(high)};
}

inline float to_float(float x) {
  return x;
}
inline float to_float(bf16 x) {
  return static_cast<float>(x);
}
inline float to_float(f16 x) {
  return static_cast<float>(x);
}
template <class T>
T from_float(float x) {
  return static_cast<T>(x);
}
// a * b, rounded also where a sum follows.
inline float rounded_product(float a, float b) {
  return a * b;
}
// The 4-bit codes of two values (encode() in tensor/float8.hpp), the first in the lower half.
inline uint32_t encode_pair(float first, float second) {
  return encode<kE2m1>(first) | encode<kE2m1>(second) << 4;
}
// The 8-bit codes of four values, the first in the lowest byte.
template <SmallFloat F>
uint32_t encode_four(const float* values) {
  uint32_t codes = 0;
  for (int k = 0; k < 4; ++k) codes |= encode<F>(values[k]) << 8 * k;
  return codes;
}
// The values of four codes of 8 bits as fp16, which has all values of e4m3 and e5m2: two in each register,
// the first in the lower half.
template <SmallFloat F>
void decode_codes(uint32_t codes, uint32_t& first, uint32_t& second) {
  static_assert(F == kE4m3 || F == kE5m2);
  first = pack_pair<f16>(decode<F>(codes & 0xFF), decode<F>(codes >> 8 & 0xFF));
  second = pack_pair<f16>(decode<F>(codes >> 16 & 0xFF), decode<F>(codes >> 24));
}

// ---- launches

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  Location at = {};
};

// Enqueues kernel(arguments …) for every thread of the grid. A grid without blocks runs nothing.
template <class... P>
void launch(Context& context, const Grid& grid, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
  throw_overflow();
  if (grid.blocks <= 0) return;
  const LaunchShape shape{grid.blocks, grid.threads, grid.shared_bytes, grid.at};
  if (current_sample()) {
    LaunchDigest of_grid;
    for (const uint64_t word : {reinterpret_cast<uint64_t>(kernel), static_cast<uint64_t>(grid.blocks),
                                static_cast<uint64_t>(grid.threads), uint64_t{grid.shared_bytes}})
      of_grid.add(word);
    LaunchDigest all = of_grid;
    (all.add(&arguments, sizeof arguments), ...);
    if (!joins_sample(of_grid, all, grid.blocks * grid.threads)) return;
  }
  enqueue_work(context, [kernel, shape, all = std::tuple<P...>(arguments...)](Context& c) {
    run_blocks(c.pool, shape, [&] { std::apply(kernel, all); });
  });
}

}  // namespace capstan::kernels::simulated
