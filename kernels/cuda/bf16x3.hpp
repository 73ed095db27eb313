// The bf16x3 decomposition. Tensor cores multiply 16-bit values: an fp32 value is the sum of three bf16
// terms, and the six largest products of terms (multiply_add() in intrinsics.hpp) give the accuracy of fp32.
#pragma once

#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// Number and type of the terms of a value of type T: three of bf16 for fp32, else the value itself.
template <class T>
struct Terms {
  using Type = T;
  static constexpr int kCount = 1;
};
template <>
struct Terms<float> {
  using Type = bf16;
  static constexpr int kCount = 3;
};

// The value whose rounding to bf16 is the next term of x: x, limited to the finite values of bf16, or
// `replacement` if x is infinite or NaN.
__device__ __forceinline__ float finite_term(float x, float replacement) {
  constexpr float kLargest = 0x1.FEp127f;
  if (!(std::fabs(x) < INFINITY)) return replacement;
  return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

// Packs each term of two neighboring values into a register, the largest term first.
//
// An infinity or NaN is the last term, which is multiplied with nothing but the first term of the other
// factor, because infinity times a term that is zero would be NaN. Its first term is 1 with the sign of x:
// together with the last term of the other factor, infinity times infinity is infinity.
template <class T>
__device__ __forceinline__ void pack_terms(float low, float high, uint32_t (&terms)[Terms<T>::kCount]) {
  using Type = typename Terms<T>::Type;
  if constexpr (Terms<T>::kCount == 1) {
    terms[0] = pack_pair<Type>(low, high);
  } else {
    CAPSTAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float low_sign = low < 0 ? -1.0f : 1.0f, high_sign = high < 0 ? -1.0f : 1.0f;
      terms[i] = pack_pair<Type>(finite_term(low, i == 0 ? low_sign : 0.0f),
                                 finite_term(high, i == 0 ? high_sign : 0.0f));
      low -= std::bit_cast<float>(terms[i] << 16);
      high -= std::bit_cast<float>(terms[i] & 0xFFFF0000);
    }
    terms[2] = pack_pair<Type>(low, high);
  }
}

// Stores the terms of eight values as chunks of 16 bytes, term i at memory[to + i * distance].
template <class T>
__device__ __forceinline__ void store_terms(const float (&values)[8], const Shared<Bytes16>& memory, int to,
                                            int distance) {
  constexpr int kTerms = Terms<T>::kCount;
  struct alignas(16) Chunk {
    uint32_t pairs[4];
  };
  Chunk chunks[kTerms];
  CAPSTAN_UNROLL
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t terms[kTerms];
    pack_terms<T>(values[2 * pair], values[2 * pair + 1], terms);
    CAPSTAN_UNROLL
    for (int term = 0; term < kTerms; ++term) chunks[term].pairs[pair] = terms[term];
  }
  CAPSTAN_UNROLL
  for (int term = 0; term < kTerms; ++term)
    memory[to + term * distance] = std::bit_cast<Bytes16>(chunks[term]);
}

}  // namespace capstan::kernels::CAPSTAN_GPU
