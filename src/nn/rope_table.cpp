#include "nn/rope_table.hpp"

#include <cmath>
#include <numbers>
#include <span>

namespace capstan::nn {

std::vector<double> rope_frequencies(const RopeOptions& options) {
  std::vector<double> frequencies(static_cast<size_t>(options.rotary_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] =
        std::pow(options.base, -2.0 * static_cast<double>(i) / static_cast<double>(options.rotary_dim));
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
      const double smooth =
          (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      f = (1 - smooth) * f / s.factor + smooth * f;
    }
  }
  return frequencies;
}

ops::RopeTable RopeTables::on(Device& device, int64_t positions) {
  OwnerScope scope(MemoryOwner::workspace);
  const Shape shape{positions, options_.rotary_dim / 2};
  const ops::RopeTable table{Tensor::empty(device, shape), Tensor::empty(device, shape)};
  if (device.is_meta()) return table;
  std::lock_guard lock(mutex_);
  const auto wanted = static_cast<size_t>(shape.elements());
  if (cos_.size() < wanted) {
    const std::vector<double> frequencies = rope_frequencies(options_);
    cos_.reserve(wanted);
    sin_.reserve(wanted);
    for (auto p = static_cast<int64_t>(cos_.size()) / shape[1]; p < positions; ++p)
      for (const double f : frequencies) {
        const double angle = static_cast<double>(p) * f;
        cos_.push_back(static_cast<float>(std::cos(angle)));
        sin_.push_back(static_cast<float>(std::sin(angle)));
      }
  }
  table.cos.copy_from_host_bytes(std::as_bytes(std::span(cos_).first(wanted)));
  table.sin.copy_from_host_bytes(std::as_bytes(std::span(sin_).first(wanted)));
  return table;
}

}  // namespace capstan::nn
