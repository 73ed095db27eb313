// Philox4x32-10 (Salmon et al., SC'11): a counter-based generator, so that a number depends on a key and a
// position and on nothing else: not on the order of drawing, the number of threads or the layout of ranks.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/host_device.hpp"

namespace capstan {

struct PhiloxKey {
  uint32_t k0, k1;
};

// The instance of a named thing, such as a parameter: FNV-1a. The same on every rank and in every version.
uint64_t random_sequence_of(std::string_view name);

namespace purpose {
inline constexpr uint32_t init = 1, hidden_dropout = 2, attention_dropout = 3, embedding_dropout = 4,
                          data_shuffle = 5, sampling = 6, mock_data = 7, adapter_dropout = 8,
                          stochastic_rounding = 9, router_jitter = 10, quantization = 20, test = 99;
}

// One block of four words at counter (lo, hi). Header-only: kernels for every device compile it.
CAPSTAN_HOST_DEVICE inline std::array<uint32_t, 4> philox4x32(PhiloxKey key, uint64_t lo, uint64_t hi) {
  uint32_t c0 = static_cast<uint32_t>(lo), c1 = static_cast<uint32_t>(lo >> 32);
  uint32_t c2 = static_cast<uint32_t>(hi), c3 = static_cast<uint32_t>(hi >> 32);
  uint32_t k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0,
                   n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {c0, c1, c2, c3};
}

// Folds (seed, purpose, instance) into a key. purpose separates uses (initialization, dropout, shuffling,
// sampling …) and instance what is within one (parameter, layer, epoch).
CAPSTAN_HOST_DEVICE inline PhiloxKey philox_key(uint64_t seed, uint32_t purpose, uint64_t instance) {
  // One block of Philox under a fixed key mixes the three numbers: any two triples give independent keys.
  const PhiloxKey fixed{0x43415053, 0x54414E31};
  const auto first = philox4x32(fixed, seed, purpose);
  const auto second =
      philox4x32({first[0], first[1]}, instance, uint64_t{first[2]} | uint64_t{first[3]} << 32);
  return {second[0], second[1]};
}

// The first number in [0, 1) of the sequence that begins at a position (PhiloxSequence::uniform).
CAPSTAN_HOST_DEVICE inline double uniform_at(PhiloxKey key, uint64_t position) {
  const auto words = philox4x32(key, position, 0);
  return static_cast<double>((uint64_t{words[0]} << 32 | words[1]) >> 11) * 0x1p-53;
}

// A sequence of words at consecutive counters, for shuffles and sampling on the host.
class PhiloxSequence {
 public:
  PhiloxSequence(PhiloxKey key, uint64_t position = 0) : key_(key), block_(position) {}
  uint32_t next32();
  uint64_t next64() { return (uint64_t{next32()} << 32) | next32(); }
  // Draws an unbiased integer in [0, bound). `bound` must be greater than 0.
  uint64_t below(uint64_t bound);
  // Draws a number in [0, 1).
  double uniform() { return static_cast<double>(next64() >> 11) * 0x1p-53; }

 private:
  PhiloxKey key_;
  uint64_t block_;
  std::array<uint32_t, 4> words_{};
  int used_ = 4;
};

// Standard normal variate at a position: Box-Muller on one block (position / 2), in double. Two positions
// share a block.
double normal_at(PhiloxKey key, uint64_t position);

}  // namespace capstan
