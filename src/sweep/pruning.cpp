#include "sweep/pruning.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace capstan::sweep {

std::optional<CurvePoint> point_at_rung(const std::vector<CurvePoint>& curve, int64_t step, int64_t reached) {
  if (curve.empty() || std::max(reached, curve.back().step) < step) return std::nullopt;
  CurvePoint found = curve.front();
  for (const CurvePoint& point : curve)
    if (point.step <= step) found = point;
  return found;
}

size_t rank_among(double value, const std::vector<double>& others, const Metric& metric) {
  return static_cast<size_t>(std::count_if(others.begin(), others.end(), [&](double other) {
    return std::isfinite(other) && (!std::isfinite(value) || metric.better(other, value));
  }));
}

// The first value of a curve that is not finite, or worse than `stop.worse_than`.
std::optional<PruningDecision> Pruning::bad_value(const std::vector<CurvePoint>& curve) const {
  const Definition& d = store_.plan().definition;
  for (const CurvePoint& point : curve) {
    const std::string where = d.metric.name + " at step " + std::to_string(point.step) + " is ";
    if (d.stop.nan && !std::isfinite(point.value)) return PruningDecision{where + "not finite", point.step};
    if (d.stop.worse_than && d.metric.better(*d.stop.worse_than, point.value))
      return PruningDecision{where + to_text(point.value) + ", worse than " + to_text(*d.stop.worse_than),
                             point.step};
  }
  return std::nullopt;
}

// Another trial's value at a rung, unless it has not come there or should have stopped before.
std::optional<double> Pruning::value_of(const TrialPlan& other, int64_t step) {
  const auto known = at_rung_.find({other.id, step});
  if (known != at_rung_.end()) return known->second;
  const auto stopped = stopped_.find(other.id);
  if (stopped != stopped_.end() && stopped->second < step) return std::nullopt;
  const auto curve = store_.read_curve(other.id, store_.plan().definition.metric.name);
  if (const auto bad = bad_value(curve); bad && bad->step <= step) return std::nullopt;
  const RunProgress progress = store_.progress(other);
  if (progress.pruned_at && *progress.pruned_at < step) return std::nullopt;
  const auto point = point_at_rung(curve, step, progress.reached);
  if (!point) return std::nullopt;
  at_rung_.emplace(std::pair(other.id, step), point->value);
  return point->value;
}

PruningDecision Pruning::decide(const TrialPlan& trial, const std::vector<CurvePoint>& curve, int64_t reached,
                                size_t& rungs) {
  const Definition& d = store_.plan().definition;
  const auto stop = [&](PruningDecision decision) {
    stopped_[trial.id] = decision.step;
    return decision;
  };
  const auto bad = bad_value(curve);
  for (; rungs < d.stop.asha.steps.size(); ++rungs) {
    const int64_t step = d.stop.asha.steps[rungs];
    if (bad && bad->step <= step) return stop(*bad);
    const auto point = point_at_rung(curve, step, reached);
    if (!point) break;
    at_rung_[{trial.id, step}] = point->value;
    // Stopping at the last step would save no time.
    if (const auto total = store_.total_steps(trial); total && step >= *total) continue;
    std::vector<double> others;
    for (const TrialPlan& other : store_.plan().trials)
      if (other.id != trial.id && other.configuration != trial.configuration)
        if (const auto theirs = value_of(other, step)) others.push_back(*theirs);
    const size_t rank = rank_among(point->value, others, d.metric);
    const auto kept = static_cast<size_t>(
        std::max(1.0, std::ceil(d.stop.asha.keep * static_cast<double>(others.size() + 1) - 1e-9)));
    if (rank < kept) continue;
    ++rungs;
    return stop(
        {d.metric.name + " at step " + std::to_string(point->step) + " is " + to_text(point->value) +
             (point->step > step ? " (the first one, for the rung at step " + std::to_string(step) + ")"
                                 : "") +
             ": place " + std::to_string(rank + 1) + " of " + std::to_string(others.size() + 1) +
             " so far, of which " + std::to_string(kept) + " go on",
         step});
  }
  return bad ? stop(*bad) : PruningDecision{};
}

}  // namespace capstan::sweep
