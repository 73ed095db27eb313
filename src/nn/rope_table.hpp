// Tables of rotary angles.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/rope.hpp"

namespace capstan::nn {

// Llama 3.1's scaling of the rotary frequencies (Llama 3 herd paper, 3.2; the reference implementation's
// `apply_scaling`): wavelengths above original / low_freq_factor are divided by factor, below original /
// high_freq_factor left alone, and interpolated in between.
struct RopeScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_positions = 8192;
};

struct RopeOptions {
  int64_t rotary_dim = 0;  // elements of a head that turn, even
  double base = 10000;
  std::optional<RopeScaling> scaling;
  bool interleaved = false;
};

// Radians per position of each pair: base^(-2i / rotary_dim), scaled. rotary_dim / 2 values.
std::vector<double> rope_frequencies(const RopeOptions& options);

// cos and sin of position * frequency, computed in double and kept in fp32 on the host for as many positions
// as were asked for so far. A device gets its copy with each micro-batch (a few MiB at most): nothing
// outlives the device. Thread-safe.
class RopeTables {
 public:
  explicit RopeTables(const RopeOptions& options) : options_(options) {}
  // Rows of positions 0 … positions - 1. On the meta device nothing is computed.
  ops::RopeTable on(Device& device, int64_t positions);

 private:
  RopeOptions options_;
  std::mutex mutex_;
  std::vector<float> cos_, sin_;  // [positions, rotary_dim / 2]
};

}  // namespace capstan::nn
