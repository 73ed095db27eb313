// The attained fraction and the fill length of a cluster's GEMMs, from measured ones.
#pragma once

#include <optional>
#include <vector>

#include "planner/cluster.hpp"
#include "planner/run_shape.hpp"

namespace capstan::planner {

// A GEMM [rows, inner] x [inner, columns] and the seconds that it takes.
struct GemmTime {
  double rows = 0, columns = 0, inner = 0, seconds = 0;
};

struct GemmFit {
  double fraction = 1;  // of the cluster's peak in the format
  double fill_length = 0;
  double error = 0;  // root mean square of the relative errors of gemm_seconds(), small ones
};
// The fit with the least error, at that fill length if it is given. The cluster gives peak, tiles and
// bandwidth; its own fraction is not used.
GemmFit fit_gemms(Cluster cluster, GemmFormat format, const std::vector<GemmTime>& times,
                  std::optional<double> fill_length = std::nullopt);

}  // namespace capstan::planner
