// Decides when to stop a trial early: if its metric is not finite or far too bad, or by asynchronous
// successive halving. A trial that reaches a rung continues if it is among the best fraction `keep` of the
// trials that have reached the rung so far. Trials of one configuration, which differ only in the seed, do
// not compete.
// The rows of metrics.jsonl decide, and not the moment at which they are read. A trial that passed a rung or
// ended between two reads is treated as if it had been read in time, and does not count at rungs beyond the
// step at which it should have stopped.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sweep/store.hpp"

namespace capstan::sweep {

// The point of a curve that counts at a rung: the last one up to that step, or the first one where there is
// none. nullopt: not known yet. reached: no more points will be added at this step or an earlier one.
std::optional<CurvePoint> point_at_rung(const std::vector<CurvePoint>& curve, int64_t step,
                                        int64_t reached = 0);

// Whether, why and at which step a trial should be stopped.
struct PruningDecision {
  // Empty: the trial continues.
  std::string reason;
  // Step of the rung or of the bad value.
  int64_t step = 0;
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
  // (trial, step): once known it stays.
  std::map<std::pair<std::string, int64_t>, double> at_rung_;
  // Trial → the step at which it should stop.
  std::map<std::string, int64_t> stopped_;
};

// Returns the rank of a value among others. Values that are not finite rank last.
size_t rank_among(double value, const std::vector<double>& others, const Metric& metric);

}  // namespace capstan::sweep
