// NF4, the 4-bit type of QLoRA (Dettmers et al. 2023, appendix E): 16 values, the scale of a block is its
// largest magnitude.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace capstan::kernels {

// Scales that share a scale of their own (double quantization).
inline constexpr int64_t kNf4NestedBlock = 256;

inline constexpr float kNf4Values[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// A copy of kNf4Values that device code can index.
constexpr std::array<float, 16> nf4_values() {
  std::array<float, 16> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = kNf4Values[i];
  return values;
}

// Thresholds: x / scale above limits[i] gets a code above i. They are the midpoints of neighboring values, in
// fp32.
constexpr std::array<float, 15> nf4_limits() {
  std::array<float, 15> limits{};
  for (size_t i = 0; i < limits.size(); ++i) limits[i] = (kNf4Values[i] + kNf4Values[i + 1]) / 2;
  return limits;
}

// Values of the dynamic 8-bit type (Dettmers et al. 2022) in which double quantization stores scales. Each
// decade below 1 holds the midpoints of equal intervals, twice as many as the decade below it. Ascending;
// rounded to fp32 as in the reference implementation.
constexpr std::array<float, 256> nf4_scale_map() {
  constexpr float kDecades[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  std::array<float, 256> map{};
  map[255] = 1;
  for (int decade = 0, offset = 1; decade < 7; ++decade) {
    const int middles = 1 << decade;
    const float step = (1.0f - 0.1f) / static_cast<float>(middles);
    // Rounded once, as a fused multiply-add does.
    const auto edge = [&](int i) {
      return static_cast<float>(2 * i <= middles ? static_cast<double>(0.1f) + static_cast<double>(step) * i
                                                 : 1.0 - static_cast<double>(step) * (middles - i));
    };
    for (int i = 0; i < middles; ++i, ++offset) {
      const float value = kDecades[decade] * ((edge(i) + edge(i + 1)) / 2);
      const auto from_zero = static_cast<size_t>(offset);
      map[127 + from_zero] = value;
      map[127 - from_zero] = -value;
    }
  }
  return map;
}

}  // namespace capstan::kernels
