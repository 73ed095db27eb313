// The Sobol sequence (Joe and Kuo's direction numbers new-joe-kuo-6.21201), in Gray-code order, unscrambled:
// the same points on every machine, each prefix of it distributed evenly.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace capstan::sweep {

class Sobol {
 public:
  static constexpr int kMaxDimensions = 24;
  // `dimensions` is from 1 to kMaxDimensions.
  explicit Sobol(int dimensions);
  // Returns the next point, with coordinates in [0, 1). The first point is all zeros. Throws
  // ErrorCode::failed after 2^30 points.
  std::vector<double> next();

 private:
  static constexpr int kBits = 30;
  std::vector<std::array<uint32_t, kBits>> directions_;
  std::vector<uint32_t> at_;
  uint32_t index_ = 0;
};

}  // namespace capstan::sweep
