// The part of numpy.random.RandomState that Megatron's data order needs: MT19937 seeded with one integer, and
// shuffle().
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace capstan::data {

class NumpyRandomState {
 public:
  explicit NumpyRandomState(uint32_t seed);

  uint32_t next32();
  // Uniform in [0, most]: draws masked by the smallest all-ones number >= most, rejected above it.
  uint64_t interval(uint64_t most);

  // Fisher-Yates from the last element down, as RandomState.shuffle does for a one-dimensional array.
  void shuffle(std::span<int32_t> values);
  void shuffle(std::span<uint32_t> values);

 private:
  void refill();
  std::array<uint32_t, 624> state_;
  size_t used_ = 624;
};

}  // namespace capstan::data
