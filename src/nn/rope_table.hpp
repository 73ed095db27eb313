// Tables of rotary angles.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/rope.hpp"

namespace capstan::nn {

// Frequencies for longer sequences than those first trained on.
struct RopeScaling {
  enum class Kind : uint8_t {
    // Wavelengths above original / low_freq_factor are divided by factor, below original / high_freq_factor left alone, and
    // interpolated in between (Llama 3 herd paper, 3.2; the reference implementation's `apply_scaling`).
    llama3,
    // All are divided by factor.
    linear,
    // Interpolated over the pairs between those that turn beta_fast times in the original length, which are left alone, and
    // those that turn beta_slow times, which are divided by factor (Peng et al. 2023; Transformers' modeling_rope_utils).
    yarn,
    // Each pair has a divisor: one list up to the original length, the other for longer sequences (Ding et al. 2024).
    longrope
  };
  Kind kind = Kind::llama3;
  double factor = 8;
  int64_t original_positions = 8192;
  double low_freq_factor = 1, high_freq_factor = 4;
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;  // yarn: between whole pairs
  std::vector<double> short_factors, long_factors;
  double attention_factor = 1;  // of cos and sin
};

struct RopeOptions {
  int64_t rotary_dim = 0;  // elements of a head that turn, even
  double base = 10000;
  std::optional<RopeScaling> scaling;
  bool interleaved = false;
};

// Radians per position of each pair: base^(-2i / rotary_dim), scaled. rotary_dim / 2 values. `positions`: the length of the
// sequences, which longrope goes by.
std::vector<double> rope_frequencies(const RopeOptions& options, int64_t positions = 0);

// cos and sin of position * frequency, computed in double and kept in fp32 on the host for as many positions
// as were asked for so far. A device gets its copy with each micro-batch (a few MiB at most): nothing
// outlives the device. Thread-safe.
class RopeTables {
 public:
  explicit RopeTables(const RopeOptions& options) : options_(options) {}
  // Rows of positions 0 … positions - 1, for sequences of that length. On the meta device nothing is computed.
  ops::RopeTable on(Device& device, int64_t positions);
  // The most positions, up to `capacity`, whose angles are those of sequences of `length`: longrope has others above the
  // original length.
  int64_t alike(int64_t length, int64_t capacity) const;

 private:
  RopeOptions options_;
  std::mutex mutex_;
  struct Rows {
    std::vector<float> cos, sin;  // [positions, rotary_dim / 2]
  };
  Rows rows_, long_rows_;  // long: longrope above the original length
};

}  // namespace capstan::nn
