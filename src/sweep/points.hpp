// The points of a definition, before they are composed.
#pragma once

#include "sweep/definition.hpp"

namespace capstan::sweep {

struct Points {
  std::vector<Values> points;  // without seeds; in the order of the grid, or as drawn
  int64_t excluded = 0;
  int64_t grid = 0;        // points of the full grid, if a subset was requested
  bool exhausted = false;  // there are fewer different points than asked for
};

// Throws ErrorCode::config for more than kMostPoints, or more dimensions than the Sobol sequence has. The
// first N points of random and sobol do not depend on how many there are.
Points points_of(const Definition& definition);

}  // namespace capstan::sweep
