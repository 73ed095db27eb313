#include "data/permutation.hpp"

#include <cmath>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan::data {

Permutation::Permutation(int64_t size, PhiloxKey key)
    : size_(static_cast<uint64_t>(size)), rounds_(size < 65536 ? 24 : 8) {
  CAPSTAN_ASSERT(size > 0 && size < (int64_t{1} << 62), "the size of a permutation");
  left_radix_ = static_cast<uint64_t>(std::sqrt(static_cast<double>(size)));
  while (left_radix_ * left_radix_ < size_) ++left_radix_;
  right_radix_ = static_cast<uint64_t>(ceil_div(size, static_cast<int64_t>(left_radix_)));
  PhiloxSequence words(key);
  for (uint64_t& round_key : keys_) round_key = words.next64();
}

}  // namespace capstan::data
