// Sort keys of numbers with an index.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/host_device.hpp"

namespace capstan::kernels {

// Ascending keys are descending numbers, of equal ones ascending indices. Every NaN comes before all numbers;
// -0 and 0 are equal. index: 32 bits.
CAPSTAN_HOST_DEVICE inline uint64_t sort_key(float number, int64_t index) {
  const uint32_t bits = std::isnan(number) ? 0x7FFFFFFFu : number == 0 ? 0 : std::bit_cast<uint32_t>(number);
  const uint32_t rising = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint64_t>(index);
}
CAPSTAN_HOST_DEVICE inline float number_of_key(uint64_t key) {
  const uint32_t rising = ~static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>((rising >> 31) != 0 ? rising & 0x7FFFFFFFu : ~rising);
}
CAPSTAN_HOST_DEVICE inline int64_t index_of_key(uint64_t key) {
  return static_cast<int64_t>(key & 0xFFFFFFFF);
}

}  // namespace capstan::kernels
