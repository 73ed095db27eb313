// CUDA's words for the host compiler: what kernels/cuda/intrinsics.hpp offers to nvcc, with the same names.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "kernels/simulated/block.hpp"
#include "kernels/simulated/enqueue.hpp"
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
#define CAPSTAN_LAUNCH_BOUNDS(threads, blocks)

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
// Joins the values of all lanes by the butterfly of five shuffles, in which all wait only once: the bits are
// those of a GPU. `lanes`: of each group whose values are joined, a power of two.
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

// ---- memory

// 16 bytes, which must begin at a multiple of 16.
struct alignas(16) Bytes16 {
  std::byte bytes[16];
};
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

// Starts an asynchronous copy of kBytes (4, 8 or 16) to the elements of shared memory from `first` on, both
// aligned to that size.
template <int kBytes, class T>
void copy_async(const Shared<T>& to, int64_t first, const T* from, Location at = {}) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  running_block->start_copy(to.array(), first, from, kBytes, at);
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

// ---- conversions

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
// The codes of two values (encode() in tensor/float8.hpp): 8 or 4 bits each, the first in the lower half.
template <SmallFloat F>
uint32_t encode_pair(float first, float second) {
  return encode<F>(first) | encode<F>(second) << (1 + F.exponent_bits + F.mantissa_bits);
}

// ---- launches

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
};

// Enqueues kernel(arguments …) for every thread of the grid. A grid without blocks runs nothing.
template <class... P>
void launch(Context& context, const Grid& grid, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
  if (grid.blocks <= 0) return;
  enqueue_work(context, [kernel, grid, all = std::tuple<P...>(arguments...)](Context& c) {
    run_blocks(c.pool, {grid.blocks, grid.threads, grid.shared_bytes}, [&] { std::apply(kernel, all); });
  });
}

}  // namespace capstan::kernels::simulated
