// When a trial is not worth going on with: a metric that is not finite or hopeless, and asynchronous successive halving. A
// trial that has come to a rung goes on when it is among the best `keep` of those that have come there so far.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "sweep/store.hpp"

namespace capstan::sweep {

// The metric of a curve at a rung: of the last point up to that step; nullopt: it has not come there.
std::optional<double> value_at_rung(const std::vector<CurvePoint>& curve, int64_t step);

class Pruning {
 public:
  explicit Pruning(const Store& store) : store_(store) {}
  // Why the trial is to be stopped; empty: it goes on. `judged`: how many rungs it has passed, kept by the caller.
  std::string verdict(const TrialPlan& trial, const std::vector<CurvePoint>& curve, size_t& judged);

 private:
  const Store& store_;
  std::map<std::pair<std::string, int64_t>, double> at_rung_;  // (trial, step): once known it stays
};

// The rank that a value has among others; what is not finite is behind everything.
size_t rank_among(double value, const std::vector<double>& others, const Metric& metric);

}  // namespace capstan::sweep
