// Helpers for the JSON files and outputs of a sweep. Include it from .cpp files.
#pragma once

#include "base/json.hpp"
#include "sweep/definition.hpp"

namespace capstan::sweep {

inline OrderedJson json_of(const Values& values) {
  OrderedJson object = OrderedJson::object();
  for (const auto& [path, value] : values) object[path] = value;
  return object;
}

inline OrderedJson json_of(const Metric& metric) {
  return {{"name", metric.name}, {"goal", config::enum_name(metric.goal)}, {"at", metric.at}};
}

}  // namespace capstan::sweep
