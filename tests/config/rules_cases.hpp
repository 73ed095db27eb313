// One line for each way to break a rule; the tables are split by topic only to keep files short.
#pragma once

#include <string>
#include <vector>

namespace capstan::config::testing {

using Overrides = std::vector<std::string>;

struct RuleCase {
  const char* rule;
  // Overrides of the bench's recipe that the rule reports.
  Overrides breaks;
  // Part of the rule's message.
  const char* says;
  // Part of the rule's help.
  const char* helps;
  // Overrides for which no rule reports an error.
  Overrides keeps;
};

// World, batch and data, pipeline.
const std::vector<RuleCase>& layout_cases();
// Shapes, precision, optimizer, recomputation, run.
const std::vector<RuleCase>& model_cases();
// Experts.
const std::vector<RuleCase>& moe_cases();

}  // namespace capstan::config::testing
