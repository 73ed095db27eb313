// When a trial is not worth going on with: a metric that is not finite or hopeless, and asynchronous
// successive halving. A trial that has come to a rung goes on when it is among the best `keep` of those that
// have come there so far. Trials of one configuration, which differ in the seed alone, do not compete.
//
// What decides is the rows of metrics.jsonl, not when somebody looks at them: a trial that has passed a rung,
// or has ended, between two looks is treated as if it had been looked at in time, and counts at no rung
// beyond the step at which it should have stopped.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sweep/store.hpp"

namespace capstan::sweep {

// The point of a curve that counts at a rung: the last one up to that step, or the first one where there is
// none. nullopt: not known yet. reached: the last step after which no more points of it or of an earlier one
// come.
std::optional<CurvePoint> point_at_rung(const std::vector<CurvePoint>& curve, int64_t step,
                                        int64_t reached = 0);

// Why a trial is to be stopped, and where.
struct PruningDecision {
  std::string reason;  // empty: it goes on
  int64_t step = 0;    // the rung, or the step of the bad value
};

class Pruning {
 public:
  explicit Pruning(const Store& store) : store_(store) {}
  // reached: as for point_at_rung. rungs: how many rungs the trial has passed, kept by the caller.
  PruningDecision decide(const TrialPlan& trial, const std::vector<CurvePoint>& curve, int64_t reached,
                         size_t& rungs);

 private:
  std::optional<double> value_of(const TrialPlan& other, int64_t step);
  std::optional<PruningDecision> bad_value(const std::vector<CurvePoint>& curve) const;

  const Store& store_;
  std::map<std::pair<std::string, int64_t>, double> at_rung_;  // (trial, step): once known it stays
  std::map<std::string, int64_t> stopped_;                     // trial → the step at which it should stop
};

// The rank that a value has among others; what is not finite is behind everything.
size_t rank_among(double value, const std::vector<double>& others, const Metric& metric);

}  // namespace capstan::sweep
