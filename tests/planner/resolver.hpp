// Recipes with overrides, for tests of changes and searches.
#pragma once

#include "config/resolve/resolve.hpp"
#include "planner/overrides.hpp"

namespace capstan::planner::test {

inline std::optional<config::Config> resolve(const std::string& recipe,
                                             const std::vector<std::string>& overrides) {
  config::Request request;
  request.recipe = recipe;
  for (const std::string& one : overrides) request.overrides.push_back(config::Override::token(one));
  config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) return std::nullopt;
  return std::move(resolution.config);
}

// Of the recipe with `always`, to which a search adds its overrides.
inline Resolver resolver(const std::string& recipe, std::vector<std::string> always = {}) {
  return [recipe, always = std::move(always)](const std::vector<std::string>& overrides) {
    std::vector<std::string> all = always;
    all.insert(all.end(), overrides.begin(), overrides.end());
    return resolve(recipe, all);
  };
}

}  // namespace capstan::planner::test
