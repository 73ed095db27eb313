// One line for each way to break a rule; the tables are split by topic only to keep files short.
#pragma once

#include <string>
#include <vector>

namespace capstan::config::testing {

using Overrides = std::vector<std::string>;

struct RuleCase {
  const char* rule;
  Overrides breaks;   // on the bench's recipe: the rule speaks
  const char* says;   // a part of its message
  const char* helps;  // a part of its help
  Overrides keeps;    // no rule has an error
};

const std::vector<RuleCase>& layout_cases();  // world, batch and data, pipeline
const std::vector<RuleCase>& model_cases();   // shapes, precision, optimizer, recomputation, run
const std::vector<RuleCase>& moe_cases();     // experts

}  // namespace capstan::config::testing
