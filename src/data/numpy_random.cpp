#include "data/numpy_random.hpp"

#include <utility>

namespace capstan::data {

NumpyRandomState::NumpyRandomState(uint32_t seed) {
  state_[0] = seed;
  for (uint32_t i = 1; i < state_.size(); ++i)
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
}

void NumpyRandomState::refill() {
  constexpr size_t n = 624, m = 397;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % n] & 0x7fffffffu);
    state_[i] = state_[(i + m) % n] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0u);
  }
  used_ = 0;
}

uint32_t NumpyRandomState::next32() {
  if (used_ == state_.size()) refill();
  uint32_t y = state_[used_++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

uint64_t NumpyRandomState::interval(uint64_t most) {
  if (most == 0) return 0;
  uint64_t mask = most;
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  uint64_t value;
  do {
    value = next32();
    // Above 32 bits numpy combines two draws, the first one in the high bits.
    if (most > 0xffffffffu) value = value << 32 | next32();
    value &= mask;
  } while (value > most);
  return value;
}

template <class T>
static void shuffle_with(NumpyRandomState& random, std::span<T> values) {
  for (size_t i = values.size(); i-- > 1;) std::swap(values[i], values[random.interval(i)]);
}
void NumpyRandomState::shuffle(std::span<int32_t> values) {
  shuffle_with(*this, values);
}
void NumpyRandomState::shuffle(std::span<uint32_t> values) {
  shuffle_with(*this, values);
}

}  // namespace capstan::data
