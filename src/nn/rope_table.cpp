#include "nn/rope_table.hpp"

#include <cmath>
#include <numbers>

namespace capstan::nn {

std::vector<double> rope_frequencies(const RopeOptions& options) {
  std::vector<double> frequencies(static_cast<size_t>(options.rotary_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = std::pow(options.base, -2.0 * static_cast<double>(i) / static_cast<double>(options.rotary_dim));
  if (!options.scaling) return frequencies;
  const RopeScaling& s = *options.scaling;
  const auto original = static_cast<double>(s.original_positions);
  const double longest_kept = original / s.high_freq_factor, shortest_scaled = original / s.low_freq_factor;
  for (double& f : frequencies) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength < longest_kept) continue;
    if (wavelength > shortest_scaled) {
      f /= s.factor;
    } else {
      const double smooth = (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      f = (1 - smooth) * f / s.factor + smooth * f;
    }
  }
  return frequencies;
}

ops::RopeTable make_rope_table(Device& device, const RopeOptions& options, int64_t positions) {
  OwnerScope scope(MemoryOwner::workspace);
  const Shape shape{positions, options.rotary_dim / 2};
  if (device.is_meta()) return {Tensor::empty(device, shape), Tensor::empty(device, shape)};
  const std::vector<double> frequencies = rope_frequencies(options);
  std::vector<float> cosines, sines;
  cosines.reserve(static_cast<size_t>(shape.elements()));
  sines.reserve(static_cast<size_t>(shape.elements()));
  for (int64_t p = 0; p < positions; ++p)
    for (const double f : frequencies) {
      const double angle = static_cast<double>(p) * f;
      cosines.push_back(static_cast<float>(std::cos(angle)));
      sines.push_back(static_cast<float>(std::sin(angle)));
    }
  return {Tensor::from_host<float>(device, shape, cosines), Tensor::from_host<float>(device, shape, sines)};
}

}  // namespace capstan::nn
