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
  // Values of the metric over steps.
  std::vector<CurvePoint> curve;
};

struct Results {
  Plan plan;
  // trials[i] is the result of plan.trials[i].
  std::vector<TrialResult> trials;
  const Metric& metric() const { return plan.definition.metric; }
};

// Reads the results. `metric` replaces the metric of the definition.
Results read_results(const Store& store, const std::optional<Metric>& metric = std::nullopt);

// "loss", "val/loss:best", "loss:mean(last 20)"; a leading "max " or "min " gives the goal. Missing
// parts come from `otherwise`. Throws ErrorCode::usage.
Metric metric_of(std::string_view text, const Metric& otherwise);

// The mean of some numbers and their sample standard deviation (divided by n - 1). A single number has no
// deviation.
struct SeedStatistics {
  int64_t n = 0;
  // NaN if there are no numbers.
  double mean = 0;
  std::optional<double> deviation;
};
SeedStatistics seed_statistics(std::span<const double> values);

// The shortest distinct names of paths: "optimizer.lr" becomes "lr" unless another path ends in it.
std::vector<std::string> short_names(std::span<const std::string> paths);

// importance: the fraction of the variance of a grid's results that the axis explains by itself. It is the
// sum of squares between the means of its values over the total sum of squares. Linked paths count as one
// axis.
struct AxisImportance {
  std::vector<std::string> paths;
  double importance = 0;
};
struct ExplainedVariance {
  // The axes, most important first.
  std::vector<AxisImportance> axes;
  // Fraction that interactions of axes and seeds explain.
  double rest = 0;
  // Number of finished trials.
  int64_t n = 0;
};
// Returns nullopt for a sweep that is no grid, has fewer than three finished trials, or has results that do
// not differ.
std::optional<ExplainedVariance> explained_variance(const Results& results);

}  // namespace capstan::sweep
