// What the runs of a sweep came to: read once, then tabled and plotted.
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
  Measured measured;
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
struct Spread {
  int64_t n = 0;
  double mean = 0;  // NaN of none
  std::optional<double> deviation;
};
Spread spread_of(std::span<const double> values);

// Names that tell the paths apart: "optimizer.lr" is "lr" where no other path ends so.
std::vector<std::string> short_names(std::span<const std::string> paths);

// How much of the variance of a grid's results each axis explains by itself: the sum of squares between the
// means of its values over the whole sum of squares, 0 … 1. Linked paths count as one axis.
struct Importance {
  std::vector<std::string> paths;
  double share = 0;
};
struct Explained {
  std::vector<Importance> axes;  // the largest first
  double rest = 0;               // what axes do together, and seeds
  int64_t n = 0;                 // trials that it rests on
};
// nullopt: no grid, fewer than three finished trials, or results that do not differ.
std::optional<Explained> explained_variance(const Results& results);

}  // namespace capstan::sweep
