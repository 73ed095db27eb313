#include "train/records/expert_loads.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/text.hpp"

namespace capstan::records {

namespace {

constexpr std::string_view kPrefix = "expert_load_layer_";
// More steps than a slider can show help no reader.
constexpr size_t kMostSteps = 60;

}  // namespace

size_t ExpertLoads::most_steps() const {
  return std::min(kMostSteps, most_ / std::max<size_t>(1, layers_.size() * experts_));
}

void ExpertLoads::add(const ReadRow& row) {
  if (!row.step) return;
  // The names are in the order of text.
  std::map<int64_t, const std::vector<double>*> by_layer;
  for (const auto& [name, loads] : row.lists)
    if (name.starts_with(kPrefix))
      if (const auto layer = parse_int(std::string_view(name).substr(kPrefix.size())))
        by_layer[*layer] = &loads;
  if (by_layer.empty()) return;
  if (experts_ == 0) experts_ = by_layer.begin()->second->size();
  std::vector<int64_t> layers;
  Step now{.step = *row.step};
  for (const auto& [layer, loads] : by_layer) {
    if (loads->size() != experts_) return;
    layers.push_back(layer);
    for (const double load : *loads)
      now.loads.push_back(static_cast<float>(load * static_cast<double>(experts_)));
  }
  if (layers_.empty()) layers_ = layers;
  if (layers != layers_ || most_steps() == 0) return;
  last_ = now;
  if (rows_++ % stride_ != 0) return;
  steps_.push_back(std::move(now));
  // One step is left for the last row.
  if (steps_.size() < std::max<size_t>(2, most_steps())) return;
  stride_ *= 2;
  size_t kept = 0;
  for (size_t i = 0; i < steps_.size(); i += 2) std::swap(steps_[kept++], steps_[i]);
  steps_.resize(kept);
}

std::string ExpertLoads::json() const {
  if (last_.loads.empty()) return "";
  std::vector<const Step*> shown;
  for (const Step& step : steps_)
    if (step.step != last_.step && most_steps() > 1) shown.push_back(&step);
  shown.push_back(&last_);
  std::string layers, steps, loads;
  for (const int64_t layer : layers_) layers += (layers.empty() ? "" : ",") + std::to_string(layer);
  for (const Step* step : shown) {
    steps += (steps.empty() ? "" : ",") + std::to_string(step->step);
    std::string values;
    for (const float load : step->loads)
      values +=
          (values.empty() ? "" : ",") + (std::isfinite(load) ? significant(load, 3) : std::string("null"));
    loads += (loads.empty() ? "[" : ",[") + values + "]";
  }
  return "{\"layers\":[" + layers + "],\"experts\":" + std::to_string(experts_) + ",\"steps\":[" + steps +
         "],\"loads\":[" + loads + "]}";
}

}  // namespace capstan::records
