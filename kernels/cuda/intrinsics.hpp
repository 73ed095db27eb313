// CUDA intrinsics for nvcc; kernels/simulated/intrinsics.hpp has the same names for the host compiler.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>

#include "kernels/common/shared_memory_limits.hpp"
#include "tensor/dtype.hpp"
#include "tensor/float8.hpp"
#include "tensor/kernel_context.hpp"

// The namespace of all that is compiled for this device.
#define CAPSTAN_GPU cuda

// Unrolls the loop that follows, whose arrays have to stay in registers.
#define CAPSTAN_UNROLL _Pragma("unroll")
// Unrolls the loop that follows twice only: long bodies without arrays, whose copies take time to compile.
#define CAPSTAN_UNROLL_TWICE _Pragma("unroll 2")
// Bounds of a kernel: the threads of its blocks, and the least number of blocks that a multiprocessor runs.
#define CAPSTAN_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
// Before the type of a constant parameter of a kernel that functions take by reference: it is not copied.
#define CAPSTAN_KERNEL_PARAMETER __grid_constant__

// `name`: count elements of shared memory.
#define CAPSTAN_SHARED(T, name, count) \
  __shared__ T name##_storage[count];  \
  const ::capstan::kernels::cuda::Shared<T> name(name##_storage)
// `name`: the shared memory of Grid::shared_bytes. Its alignment is that of load_matrices().
#define CAPSTAN_DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(128) unsigned char name##_storage[]; \
  const ::capstan::kernels::cuda::Shared<T> name(reinterpret_cast<T*>(name##_storage))

namespace capstan::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// The source location of a call, which only the simulation needs.
struct Location {};

// Shared memory that a kernel has declared.
template <class T>
class Shared {
 public:
  __device__ explicit Shared(T* data) : data_(data) {}
  __device__ T& operator[](int64_t i) const { return data_[i]; }
  __device__ T* data() const { return data_; }

 private:
  T* data_;
};

// An index or a size as a smaller type, into which it fits; the simulation checks that.
template <class To>
__host__ __device__ To narrow(int64_t value) {
  return static_cast<To>(value);
}

// ---- threads and blocks

__device__ inline int thread_index() {
  return static_cast<int>(threadIdx.x);
}
__device__ inline int block_threads() {
  return static_cast<int>(blockDim.x);
}
__device__ inline int64_t block_index() {
  return blockIdx.x;
}
__device__ inline int64_t grid_blocks() {
  return gridDim.x;
}
// Blocks of a grid that loops over work whose amount only device memory has. They fill the largest GPU.
constexpr int64_t looping_blocks(int64_t on_gpu) {
  return on_gpu;
}

// ---- barriers and warps

__device__ inline void sync_threads(Location = {}) {
  __syncthreads();
}
__device__ inline void sync_warp(uint32_t mask = kAllLanes, Location = {}) {
  __syncwarp(mask);
}
template <class T>
__device__ T shuffle(T value, int lane, uint32_t mask = kAllLanes, Location = {}) {
  return __shfl_sync(mask, value, lane);
}
template <class T>
__device__ T shuffle_xor(T value, int lane_mask, uint32_t mask = kAllLanes, Location = {}) {
  return __shfl_xor_sync(mask, value, lane_mask);
}
template <class T>
__device__ T shuffle_up(T value, int distance, uint32_t mask = kAllLanes, Location = {}) {
  return __shfl_up_sync(mask, value, static_cast<unsigned>(distance));
}
__device__ inline uint32_t ballot(bool predicate, uint32_t mask = kAllLanes, Location = {}) {
  return __ballot_sync(mask, predicate);
}
// Joins the values of all lanes by a butterfly. `lanes`: of each group whose values are joined, a power of
// two.
template <class T, class Join>
__device__ T warp_reduce(T value, Join&& join, int lanes = kWarp, Location = {}) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    value = join(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// Reduces each of the values over groups of `lanes` lanes. lanes: a power of two.
template <int kCount, class T, class Join>
__device__ __forceinline__ void reduce_lanes(T (&values)[kCount], Join&& join, int lanes, Location = {}) {
  CAPSTAN_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = warp_reduce(values[i], join, lanes);
}

// ---- memory

// 16 bytes, which must begin at a multiple of 16.
struct alignas(16) Bytes16 {
  uint4 words;
};
__device__ inline Bytes16 load_16(const void* p) {
  return {*static_cast<const uint4*>(p)};
}
// To global memory. From an assignment the compiler often makes four stores of 4 bytes.
__device__ __forceinline__ void store_16(void* p, const Bytes16& value) {
  const uint4& words = value.words;
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
// Stores 4 bytes at an address that is a multiple of 4.
__device__ inline void store_4(void* p, uint32_t value) {
  *static_cast<uint32_t*>(p) = value;
}

// 16 bytes of shared memory, from an element on that lies at a multiple of 16.
template <class T>
__device__ Bytes16 load_16(const Shared<T>& from, int64_t first, Location = {}) {
  return load_16(from.data() + first);
}
template <class T>
__device__ void store_16(const Shared<T>& to, int64_t first, const Bytes16& value, Location = {}) {
  *reinterpret_cast<uint4*>(to.data() + first) = value.words;
}
// kBytes (2, 4, 8 or 16) of words, the lowest byte first, to an address that is a multiple of kBytes.
template <int kBytes>
__device__ void store_words(void* p, const uint32_t* words, Location = {}) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 2)
    *static_cast<uint16_t*>(p) = static_cast<uint16_t>(words[0]);
  else if constexpr (kBytes == 4)
    *static_cast<uint32_t*>(p) = words[0];
  else if constexpr (kBytes == 8)
    *static_cast<uint2*>(p) = {words[0], words[1]};
  else
    *static_cast<uint4*>(p) = {words[0], words[1], words[2], words[3]};
}
// *target = max(*target, value): the same in every order of threads.
__device__ inline void atomic_max(uint32_t* target, uint32_t value) {
  atomicMax(target, value);
}

// *target += value: integers have the same sum in every order of threads.
__device__ inline void atomic_add(uint64_t* target, uint64_t value) {
  static_assert(sizeof(uint64_t) == sizeof(unsigned long long));
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
}

// Starts an asynchronous copy of kBytes (4, 8 or 16) to the elements of shared memory from `first` on, both
// aligned to that size.
template <int kBytes, class T>
__device__ void copy_async(const Shared<T>& to, int64_t first, const T* from, Location = {}) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(to.data() + first));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(from), "n"(kBytes)
                 : "memory");
}
// As copy_async; copies the first `bytes` of kBytes and writes zeros after them.
template <int kBytes, class T>
__device__ __forceinline__ void copy_part_async(const Shared<T>& to, int64_t first, const T* from, int bytes,
                                                Location = {}) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(to.data())) +
                      static_cast<uint32_t>(first) * static_cast<uint32_t>(sizeof(T));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
}
// As copy_async of 16 bytes if `there`; otherwise reads nothing and writes zeros. A size in a register, as
// that of copy_part_async, would take three more instructions.
__device__ __forceinline__ void copy_async_if(bool there, const Shared<Bytes16>& to, int64_t first,
                                              const Bytes16* from, Location = {}) {
  const auto target =
      static_cast<uint32_t>(__cvta_generic_to_shared(to.data())) + static_cast<uint32_t>(first) * 16;
  asm volatile(
      "{ .reg .pred ignored; setp.eq.u32 ignored, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, ignored; "
      "}" ::"r"(target),
      "l"(from), "r"(uint32_t{there})
      : "memory");
}
// Ends a group of copies.
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all groups of this thread but the kPending latest. Other threads see them after a barrier.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- tensor cores, from sm_80 on
//
// A warp multiplies matrices whose elements are in the registers of its lanes, two 16-bit values in each
// (fragments of mma.m16n8k16). Lane l holds
//   of an 8 x 8 matrix                    the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1)
//   of a 16 x 16 fragment of A            those elements of the quarters (0, 0), (1, 0), (0, 1), (1, 1)
//   of a 16 x 8 fragment of B             those elements of the halves of its transpose
//   of 16 x 8 fp32 accumulators           rows l / 4 and l / 4 + 8, columns 2 (l % 4) and 2 (l % 4) + 1

// Loads four 8 x 8 matrices (ldmatrix). Lane l gives the address of row l % 8 of matrix l / 8. kTransposed:
// lanes get the elements of the transposed matrices.
template <bool kTransposed>
__device__ __forceinline__ void load_matrix_group(uint32_t (&to)[4], uint32_t address) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}
// Loads groups of four 8 x 8 matrices. Lane l gives the index in shared memory of row l % 8 of matrix l / 8
// of each group.
template <bool kTransposed, int kCount>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[kCount][4], const Shared<Bytes16>& from,
                                              const int (&rows)[kCount], Location = {}) {
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(from.data()));
  CAPSTAN_UNROLL
  for (int i = 0; i < kCount; ++i)
    load_matrix_group<kTransposed>(to[i], base + static_cast<uint32_t>(rows[i]) * 16);
}
// From one index in swizzled shared memory to another one: (index ^ flip) + offset, where flip < 8.
struct SwizzledStep {
  int flip, offset;
};
// As above; lane l gives one index, from which constant steps lead to its row in each group. `from` begins at
// a multiple of 128 bytes, so that a step takes one instruction at most.
template <bool kTransposed, int kCount>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[kCount][4], const Shared<Bytes16>& from, int row,
                                              const SwizzledStep (&steps)[kCount], Location = {}) {
  const uint32_t first =
      static_cast<uint32_t>(__cvta_generic_to_shared(from.data())) + static_cast<uint32_t>(row) * 16;
  CAPSTAN_UNROLL
  for (int i = 0; i < kCount; ++i)
    load_matrix_group<kTransposed>(to[i], (first ^ static_cast<uint32_t>(steps[i].flip) * 16) +
                                              static_cast<uint32_t>(steps[i].offset) * 16);
}
// accumulators += a b for a fragment of A and 8 columns of B.
template <class T>
__device__ __forceinline__ void multiply_add_8(float (&accumulators)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// accumulators[m][first + n] += a[m] b[n] for kM A fragments and for B fragments of 16 x 16, which are two of
// 16 x 8. Values are the sums of kTerms terms, the largest first (kernels/cuda/bf16x3.hpp): all fragments of
// the first term, then those of the second. Products of terms i and j with i + j >= kTerms are left out.
template <class T, int kTerms, int kM, int kAccumulators, int kA, int kB>
__device__ __forceinline__ void multiply_add(float (&accumulators)[kM][kAccumulators][4], int first,
                                             const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4],
                                             Location = {}) {
  static_assert(kA == kTerms * kM && kB % kTerms == 0);
  constexpr int kN = kB / kTerms;
  CAPSTAN_UNROLL
  for (int order = kTerms - 1; order >= 0; --order) {
    CAPSTAN_UNROLL
    for (int i = 0; i <= order; ++i) {
      CAPSTAN_UNROLL
      for (int n = 0; n < kN; ++n) {
        const uint32_t(&right)[4] = b[(order - i) * kN + n];
        CAPSTAN_UNROLL
        for (int m = 0; m < kM; ++m) {
          multiply_add_8<T>(accumulators[m][first + 2 * n], a[i * kM + m], right[0], right[1]);
          multiply_add_8<T>(accumulators[m][first + 2 * n + 1], a[i * kM + m], right[2], right[3]);
        }
      }
    }
  }
}

// ---- functions and conversions, by the processor's instructions. CUDA's headers of 16-bit types have the
// same ones, and take nvcc a tenth of the time of a source.

// 2^x with a relative error of 2^-22; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger value; NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
// 1 / x with an error of one unit in the last place.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two values as T in one register, `low` in its lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

struct FloatPair {
  float low, high;
};
// The values of pack_pair().
template <class T>
__device__ __forceinline__ FloatPair unpack_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  } else {
    FloatPair values;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(values.low), "=f"(values.high)
        : "r"(pair));
    return values;
  }
}

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ inline float to_float(f16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}
template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    T result;
    if constexpr (std::is_same_v<T, bf16>)
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    else
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
  }
}
// a * b, rounded also where a sum follows.
__device__ inline float rounded_product(float a, float b) {
  return __fmul_rn(a, b);
}
// The 4-bit codes of two values (encode() in tensor/float8.hpp, whose bits they have), the first in the lower
// half. By an instruction on sm_100a and its like.
__device__ inline uint32_t encode_pair(float first, float second) {
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
  uint16_t codes;
  asm("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1; mov.b16 %0, {pair, 0}; }"
      : "=h"(codes)
      : "f"(first), "f"(second));
  // The instruction drops the sign of NaN.
  return codes | __float_as_uint(first) >> 31 << 3 | __float_as_uint(second) >> 31 << 7;
#else
  return encode<kE2m1>(first) | encode<kE2m1>(second) << 4;
#endif
}
// The 8-bit codes of four values, the first in the lowest byte. By instructions from sm_89 on.
template <SmallFloat F>
__device__ uint32_t encode_four(const float* values) {
  static_assert(F == kE4m3 || F == kE5m2);
#if __CUDA_ARCH__ >= 890
  uint16_t low, high;
  const auto convert = [](uint16_t& codes, float first, float second) {
    if constexpr (F == kE4m3)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
  };
  convert(low, values[0], values[1]), convert(high, values[2], values[3]);
  // The instructions drop the sign of NaN: the highest bytes of the values have it.
  const auto highest = [](float a, float b) {
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x73);
  };
  const uint32_t signs =
      __byte_perm(highest(values[0], values[1]), highest(values[2], values[3]), 0x5410) & 0x80808080u;
  return static_cast<uint32_t>(high) << 16 | low | signs;
#else
  uint32_t codes = 0;
  for (int k = 0; k < 4; ++k) codes |= encode<F>(values[k]) << 8 * k;
  return codes;
#endif
}
// The values of four codes of 8 bits as fp16, which has all values of e4m3 and e5m2: two in each register,
// the first in the lower half.
template <SmallFloat F>
__device__ __forceinline__ void decode_codes(uint32_t codes, uint32_t& first, uint32_t& second) {
  static_assert(F == kE4m3 || F == kE5m2);
  if constexpr (F == kE5m2) {
    // The upper byte of the fp16.
    first = __byte_perm(codes, 0, 0x1404), second = __byte_perm(codes, 0, 0x3424);
  } else {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
        "cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(codes));
#else
    first = pack_pair<f16>(decode<F>(codes & 0xFF), decode<F>(codes >> 8 & 0xFF));
    second = pack_pair<f16>(decode<F>(codes >> 16 & 0xFF), decode<F>(codes >> 24));
#endif
  }
}

// ---- launches

// Bytes of shared memory that a launch may have on the current device, of which a process uses one.
inline size_t most_shared_bytes() {
  static const size_t bytes = [] {
    int device = 0, most = 0;
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
    return known ? static_cast<size_t>(most) : kDefaultSharedBytes;
  }();
  return bytes;
}

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
};

// Lets a kernel have so much dynamic shared memory. The limit never becomes less: a graph may hold a launch
// of the kernel with more.
inline cudaError_t raise_shared_limit(const void* kernel, size_t bytes) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<const void*, size_t>& limits = *new std::map<const void*, size_t>;
  const std::scoped_lock lock(mutex);
  size_t& limit = limits[kernel];
  if (bytes <= limit) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status == cudaSuccess) limit = bytes;
  return status;
}

// Enqueues kernel(arguments …) for every thread of the grid on the stream of the context. A grid without
// blocks runs nothing. An error is reported in the context's slot.
template <class... P>
void launch(Context& context, const Grid& grid, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
  if (grid.blocks <= 0) return;
  const auto report = [&](const char* reason) {
    if (!context.error->file) *context.error = {__FILE__, "launch", 0, 0, reason};
  };
  // The type of a grid would drop their upper bits.
  if (grid.blocks > INT32_MAX) return report("a launch has more blocks than a GPU runs, which are 2^31 - 1");
  cudaError_t status = cudaSuccess;
  if (raises_shared_limit(grid.shared_bytes))
    status = raise_shared_limit(reinterpret_cast<const void*>(kernel), grid.shared_bytes);
  if (status == cudaSuccess) {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
    status = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid.blocks)),
                              dim3(static_cast<unsigned>(grid.threads)), addresses, grid.shared_bytes,
                              static_cast<cudaStream_t>(context.stream));
  }
  if (status == cudaSuccess) return;
  // Clears the error; otherwise the next wait of the host would report it too.
  (void)cudaGetLastError();
  report(cudaGetErrorString(status));
}

}  // namespace capstan::kernels::cuda
