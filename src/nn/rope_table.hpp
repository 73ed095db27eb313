// Tables of rotary angles.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::nn {

// Frequencies for longer sequences than those first trained on.
struct RopeScaling {
  enum class Kind : uint8_t {
    // Divides the frequencies of wavelengths above original / low_freq_factor by `factor`, keeps those below
    // original / high_freq_factor, and interpolates in between (Llama 3 herd paper, 3.2; the reference
    // implementation's `apply_scaling`).
    llama3,
    // Divides all frequencies by `factor`.
    linear,
    // Keeps pairs that rotate at least beta_fast times over the original length, divides those that rotate at
    // most beta_slow times by `factor`, and interpolates in between (Peng et al. 2023; Transformers'
    // modeling_rope_utils).
    yarn,
    // Divides each pair by its own factor: one list up to the original length, another for longer sequences
    // (Ding et al. 2024).
    longrope
  };
  Kind kind = Kind::llama3;
  double factor = 8;
  int64_t original_positions = 8192;
  double low_freq_factor = 1, high_freq_factor = 4;
  double beta_fast = 32, beta_slow = 1;
  // Yarn: rounds the interpolation bounds to full pairs.
  bool truncate = true;
  std::vector<double> short_factors, long_factors;
  // Factor of cos and sin.
  double attention_factor = 1;
};

struct RopeOptions {
  // Rotated elements of a head, even.
  int64_t rotary_dim = 0;
  double base = 10000;
  std::optional<RopeScaling> scaling;
  bool interleaved = false;
};

// Radians per position of each pair: base^(-2i / rotary_dim), scaled. rotary_dim / 2 values. `positions`: the
// sequence length, which selects longrope's factors.
std::vector<double> rope_frequencies(const RopeOptions& options, int64_t positions = 0);

// cos and sin of position * frequency, computed in double and cached in fp32 on the host for the positions
// requested so far. Thread-safe.
class RopeTables {
 public:
  explicit RopeTables(const RopeOptions& options);
  // The rows of positions 0 … positions - 1, for sequences of that length, on the context's device. The
  // context keeps them, and copies them again only when it needs more positions. Computes nothing on the meta
  // device.
  ops::RopeTable in(StepContext& context, int64_t positions);
  // Largest sequence length, at most `capacity`, for which keys that were rotated for sequences of `length`
  // stay valid in a cache: longrope switches frequencies beyond the original length.
  int64_t valid_cache_length(int64_t length, int64_t capacity) const;

 private:
  ops::RopeTable on(Device& device, int64_t positions);

  RopeOptions options_;
  // Key of StepContext::constants for the rows; key_ + 1 is that of the rows with longrope's long factors.
  const uint64_t key_;
  std::mutex mutex_;
  struct Rows {
    std::vector<float> cos, sin;  // [positions, rotary_dim / 2]
  };
  // Long: longrope above the original length.
  Rows rows_, long_rows_;
};

}  // namespace capstan::nn
