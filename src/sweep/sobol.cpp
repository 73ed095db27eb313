#include "sweep/sobol.hpp"

#include <bit>

#include "base/error.hpp"

namespace capstan::sweep {

namespace {

// A primitive polynomial over GF(2), leading and constant term included, and the first direction integers
// m_i.
struct Direction {
  uint32_t polynomial;
  std::array<uint32_t, 7> first;
};
constexpr std::array<Direction, Sobol::kMaxDimensions> kDirections{{{1, {}},
                                                                    {3, {1}},
                                                                    {7, {1, 3}},
                                                                    {11, {1, 3, 1}},
                                                                    {13, {1, 1, 1}},
                                                                    {19, {1, 1, 3, 3}},
                                                                    {25, {1, 3, 5, 13}},
                                                                    {37, {1, 1, 5, 5, 17}},
                                                                    {41, {1, 1, 5, 5, 5}},
                                                                    {47, {1, 1, 7, 11, 19}},
                                                                    {55, {1, 1, 5, 1, 1}},
                                                                    {59, {1, 1, 1, 3, 11}},
                                                                    {61, {1, 3, 5, 5, 31}},
                                                                    {67, {1, 3, 3, 9, 7, 49}},
                                                                    {91, {1, 1, 1, 15, 21, 21}},
                                                                    {97, {1, 3, 1, 13, 27, 49}},
                                                                    {103, {1, 1, 1, 15, 7, 5}},
                                                                    {109, {1, 3, 1, 15, 13, 25}},
                                                                    {115, {1, 1, 5, 5, 19, 61}},
                                                                    {131, {1, 3, 7, 11, 23, 15, 103}},
                                                                    {137, {1, 3, 7, 13, 13, 15, 69}},
                                                                    {143, {1, 1, 3, 13, 7, 35, 63}},
                                                                    {145, {1, 3, 5, 9, 1, 25, 53}},
                                                                    {157, {1, 3, 1, 13, 9, 35, 107}}}};

}  // namespace

Sobol::Sobol(int dimensions) : at_(static_cast<size_t>(dimensions)) {
  CAPSTAN_ASSERT(dimensions >= 1 && dimensions <= kMaxDimensions, "dimensions of a Sobol sequence");
  for (int d = 0; d < dimensions; ++d) {
    const Direction& direction = kDirections[static_cast<size_t>(d)];
    const int degree = std::bit_width(direction.polynomial) - 1;
    std::array<uint32_t, kBits> m{};
    for (int i = 0; i < kBits; ++i) {
      const auto at = static_cast<size_t>(i);
      if (degree == 0) {
        m[at] = 1;
      } else if (i < degree) {
        m[at] = direction.first[at];
      } else {
        // m_i = 2 a_1 m_(i-1) xor ... xor 2^s m_(i-s) xor m_(i-s)
        m[at] = m[at - static_cast<size_t>(degree)];
        for (int k = 1; k <= degree; ++k)
          if ((direction.polynomial >> (degree - k)) & 1) m[at] ^= m[at - static_cast<size_t>(k)] << k;
      }
    }
    for (int i = 0; i < kBits; ++i) m[static_cast<size_t>(i)] <<= kBits - 1 - i;
    directions_.push_back(m);
  }
}

std::vector<double> Sobol::next() {
  if (index_ >> kBits) fail(ErrorCode::failed, "a Sobol sequence has 2^30 points");
  std::vector<double> point;
  for (const uint32_t bits : at_) point.push_back(static_cast<double>(bits) * 0x1p-30);
  const auto changed = static_cast<size_t>(std::countr_one(index_));
  if (changed < kBits)
    for (size_t d = 0; d < at_.size(); ++d) at_[d] ^= directions_[d][changed];
  ++index_;
  return point;
}

}  // namespace capstan::sweep
