// Maxima over threads.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

namespace capstan::kernels {

// target = max(target, value) for values that are not negative, from several threads; NaN is the largest.
inline void atomic_max(float& target, float value) {
  const std::atomic_ref<uint32_t> bits(reinterpret_cast<uint32_t&>(target));
  const uint32_t wanted = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu;
  uint32_t before = bits.load(std::memory_order_relaxed);
  while (before < wanted && !bits.compare_exchange_weak(before, wanted, std::memory_order_relaxed)) {
  }
}

}  // namespace capstan::kernels
