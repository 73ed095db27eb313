// A bench for tests of sections: overrides on a small legal recipe, derivations, one rule. No files, no
// composition.
#pragma once

#include <string>
#include <vector>

#include "config/sections/sections.hpp"

namespace capstan::config::testing {

struct Finding {
  std::string message, help;
  // "path = value" and "expression = value", of the rule's reads where none are named.
  std::vector<std::string> operands;
  // Fields that the rule points at or names as operands.
  std::vector<std::string> paths;
  bool warning = false;
};

// The small recipe: 8 layers, 64 wide, 8 heads, 4 key/value heads, mock data, one rank; then `overrides`,
// each "path=value". A name or alias that does not exist, or a value that does not convert, fails the test.
Config bench_config(const std::vector<std::string>& overrides);

// given: the overrides of a test, for findings about fields that the user gives.
std::vector<Finding> findings(const std::string& rule, const Config& config,
                              const std::vector<std::string>& given);
// "rule: message" of every error that any rule finds.
std::vector<std::string> all_errors(const Config& config);

}  // namespace capstan::config::testing
