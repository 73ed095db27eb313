#include "planner/gemm_fit.hpp"

#include <cmath>
#include <limits>

#include "planner/kernels.hpp"

namespace capstan::planner {

namespace {

// Of the logarithms of times: twice and half the measured time are errors of the same size.
double root_mean_square(const Cluster& cluster, GemmFormat format, const std::vector<GemmTime>& times) {
  double errors = 0;
  for (const GemmTime& one : times) {
    const double ratio = gemm_seconds(cluster, format, one.rows, one.columns, one.inner) / one.seconds;
    errors += std::log(ratio) * std::log(ratio);
  }
  return std::sqrt(errors / static_cast<double>(times.size()));
}

// The best fraction for the fill length of the cluster, by ternary search. Bytes limit some GEMMs, so that
// there is no closed form.
GemmFit fit_fraction(Cluster cluster, GemmFormat format, const std::vector<GemmTime>& times) {
  const auto error = [&](double logarithm) {
    cluster.gemm_efficiency = std::exp(logarithm);
    return root_mean_square(cluster, format, times);
  };
  // Above 1 where the peak is a measured one, which a longer inner dimension exceeds.
  double low = std::log(0.01), high = std::log(4.0);
  while (high - low > 1e-4) {
    const double third = (high - low) / 3;
    if (error(low + third) < error(high - third))
      high -= third;
    else
      low += third;
  }
  return {std::exp(low), cluster.gemm_fill_length, error(low)};
}

}  // namespace

GemmFit fit_gemms(Cluster cluster, GemmFormat format, const std::vector<GemmTime>& times,
                  std::optional<double> fill_length) {
  cluster.fp8_gemm_efficiency.reset(), cluster.fp4_gemm_efficiency.reset();
  if (fill_length) {
    cluster.gemm_fill_length = *fill_length;
    return fit_fraction(cluster, format, times);
  }
  GemmFit best;
  best.error = std::numeric_limits<double>::infinity();
  for (double length = 0; length < 1100; length = length < 8 ? 8 : std::round(1.2 * length)) {
    cluster.gemm_fill_length = length;
    const GemmFit fitted = fit_fraction(cluster, format, times);
    if (fitted.error < best.error) best = fitted;
  }
  return best;
}

}  // namespace capstan::planner
