// The points of a definition, before they are composed.
#pragma once

#include "sweep/definition.hpp"

namespace capstan::sweep {

struct Points {
  // The points without seeds, in the order of the grid, or as drawn.
  std::vector<Values> points;
  int64_t excluded = 0;
  // Points of the full grid, if a subset was requested.
  int64_t grid = 0;
  // Whether there are fewer different points than requested.
  bool exhausted = false;
};

// Throws ErrorCode::config for more than kMaxPoints, or more dimensions than the Sobol sequence has. The
// first N points of random and sobol do not depend on how many there are.
Points points_of(const Definition& definition);

}  // namespace capstan::sweep
