#include "sweep/pruning.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace capstan::sweep {

std::optional<double> value_at_rung(const std::vector<CurvePoint>& curve, int64_t step) {
  if (curve.empty() || curve.back().step < step) return std::nullopt;
  double value = curve.front().value;
  for (const CurvePoint& point : curve)
    if (point.step <= step) value = point.value;
  return value;
}

size_t rank_among(double value, const std::vector<double>& others, const Metric& metric) {
  return static_cast<size_t>(std::count_if(others.begin(), others.end(), [&](double other) {
    return std::isfinite(other) && (!std::isfinite(value) || metric.better(other, value));
  }));
}

std::string Pruning::verdict(const TrialPlan& trial, const std::vector<CurvePoint>& curve, size_t& judged) {
  const Definition& d = store_.plan().definition;
  for (const CurvePoint& point : curve) {
    const std::string where = d.metric.name + " at step " + std::to_string(point.step) + " is ";
    if (d.stop.nan && !std::isfinite(point.value)) return where + "not finite";
    if (d.stop.worse_than && d.metric.better(*d.stop.worse_than, point.value))
      return where + to_text(point.value) + ", worse than " + to_text(*d.stop.worse_than);
  }
  while (judged < d.stop.steps.size()) {
    const int64_t step = d.stop.steps[judged];
    const auto value = value_at_rung(curve, step);
    if (!value) break;
    ++judged;
    at_rung_[{trial.id, step}] = *value;
    if (step >= trial.estimate.steps) continue;  // nothing would be saved
    std::vector<double> others;
    for (const TrialPlan& other : store_.plan().trials) {
      if (other.id == trial.id) continue;
      auto known = at_rung_.find({other.id, step});
      if (known == at_rung_.end()) {
        const auto there = value_at_rung(store_.read_curve(other.id, d.metric.name), step);
        if (!there) continue;
        known = at_rung_.emplace(std::pair(other.id, step), *there).first;
      }
      others.push_back(known->second);
    }
    const size_t rank = rank_among(*value, others, d.metric);
    const auto kept = static_cast<size_t>(
        std::max(1.0, std::ceil(d.stop.keep * static_cast<double>(others.size() + 1) - 1e-9)));
    if (rank >= kept)
      return d.metric.name + " at step " + std::to_string(step) + " is " + to_text(*value) + ": place " +
             std::to_string(rank + 1) + " of " + std::to_string(others.size() + 1) + " so far, of which " +
             std::to_string(kept) + " go on";
  }
  return {};
}

}  // namespace capstan::sweep
