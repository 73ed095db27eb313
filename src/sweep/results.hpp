// The results of a sweep, read once for the table and the plot.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sweep/store.hpp"

namespace capstan::sweep {

struct TrialResult {
  TrialStatus status;
  RunMeasurements measured;
  std::vector<CurvePoint> curve;  // of the metric
};

struct Results {
  Plan plan;
  std::vector<TrialResult> trials;  // trials[i] of plan.trials[i]
  const Metric& metric() const { return plan.definition.metric; }
};

// `metric`: instead of the definition's.
Results read_results(const Store& store, const std::optional<Metric>& metric = std::nullopt);

// "loss", "val/loss:best", "loss:mean(last 20)"; a leading "max " or "min " gives the goal. What is left out
// is as in `otherwise`.
// Throws ErrorCode::usage.
Metric metric_of(std::string_view text, const Metric& otherwise);

// The mean of some numbers and their sample standard deviation (divided by n - 1), which one number does not
// have.
struct SeedStatistics {
  int64_t n = 0;
  double mean = 0;  // NaN of none
  std::optional<double> deviation;
};
SeedStatistics seed_statistics(std::span<const double> values);

// The shortest distinct names of paths: "optimizer.lr" becomes "lr" unless another path ends in it.
std::vector<std::string> short_names(std::span<const std::string> paths);

// The fraction of the variance of a grid's results each axis explains by itself: the sum of squares between
// the means of its values over the total sum of squares, 0 … 1. Linked paths count as one axis.
struct Importance {
  std::vector<std::string> paths;
  double share = 0;
};
struct ExplainedVariance {
  std::vector<Importance> axes;  // the largest first
  double rest = 0;               // what axes do together, and seeds
  int64_t n = 0;                 // trials that it rests on
};
// nullopt: no grid, fewer than three finished trials, or results that do not differ.
std::optional<ExplainedVariance> explained_variance(const Results& results);

}  // namespace capstan::sweep
