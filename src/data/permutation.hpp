// A keyed permutation of [0, n) that shuffles documents and samples. It is computed, not stored: any position
// can be computed independently, in any order, without memory. Positions are written as (l, r) in mixed radix
// a × b >= n, a and b near sqrt(n), and pass the rounds of a Feistel network whose round keys are Philox
// words: l += F(r) mod a, then r += F(l) mod b. A result at or above n goes through again (cycle walking),
// which happens to fewer than about 2/sqrt(n) of the positions. Eight rounds are enough where a round draws
// from many values; below 65536 positions it takes 24 until every order is equally likely (the tests measure
// it).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/philox.hpp"

namespace capstan::data {

class Permutation {
 public:
  // 0 < size < 2^62
  Permutation(int64_t size, PhiloxKey key);

  int64_t size() const { return static_cast<int64_t>(size_); }

  // Returns the element at `position`, which is in [0, size()).
  int64_t operator()(int64_t position) const {
    auto x = static_cast<uint64_t>(position);
    do {
      uint64_t left = x / right_radix_, right = x % right_radix_;
      for (std::size_t round = 0; round < rounds_; round += 2) {
        left += scaled(right, keys_[round], left_radix_);
        if (left >= left_radix_) left -= left_radix_;
        right += scaled(left, keys_[round + 1], right_radix_);
        if (right >= right_radix_) right -= right_radix_;
      }
      x = left * right_radix_ + right;
    } while (x >= size_);
    return static_cast<int64_t>(x);
  }

 private:
  // A well-mixed number below `radix` (< 2^32).
  static uint64_t scaled(uint64_t value, uint64_t key, uint64_t radix) {
    uint64_t h = (value ^ key) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93u;
    return ((h >> 32) * radix) >> 32;
  }

  uint64_t size_, left_radix_, right_radix_;
  std::size_t rounds_;
  std::array<uint64_t, 24> keys_;
};

}  // namespace capstan::data
