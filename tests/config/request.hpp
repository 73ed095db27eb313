// Requests for the recipes that come with the binary.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"

namespace capstan::config::testing {

inline Request request_of(const std::string& recipe, const std::vector<std::string>& overrides = {},
                          std::optional<int64_t> ranks = {}) {
  Request request;
  request.recipe = recipe;
  request.ranks = ranks;
  for (const auto& text : overrides) request.overrides.push_back(Override::token(text));
  return request;
}

}  // namespace capstan::config::testing
