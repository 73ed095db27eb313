#include "base/philox.hpp"

#include <cmath>
#include <numbers>

namespace capstan {

// The hash distinguishes names and must never change.
uint64_t random_sequence_of(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

uint32_t PhiloxSequence::next32() {
  if (used_ == 4) {
    words_ = philox4x32(key_, block_++, 0);
    used_ = 0;
  }
  return words_[static_cast<size_t>(used_++)];
}

uint64_t PhiloxSequence::below(uint64_t bound) {
  const uint64_t limit = UINT64_MAX - UINT64_MAX % bound;
  uint64_t value;
  do {
    value = next64();
  } while (value >= limit);
  return value % bound;
}

double normal_at(PhiloxKey key, uint64_t position) {
  const auto w = philox4x32(key, position >> 1, 0);
  const double u1 = ((static_cast<double>((uint64_t{w[0]} << 32 | w[1]) >> 11)) + 0.5) * 0x1p-53;
  const double u2 = static_cast<double>((uint64_t{w[2]} << 32 | w[3]) >> 11) * 0x1p-53;
  const double radius = std::sqrt(-2.0 * std::log(u1)), angle = 2.0 * std::numbers::pi * u2;
  return (position & 1) ? radius * std::sin(angle) : radius * std::cos(angle);
}

}  // namespace capstan
