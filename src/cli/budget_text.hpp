// The complete run of a plan as text and as JSON: days, failures, saves, energy, cost.
#pragma once

#include <string>

#include "base/json.hpp"
#include "planner/budget.hpp"

namespace capstan::cli {

// compute: the FLOPs of --compute, from which the tokens follow; 0: they were given.
std::string budget_text(const planner::RunShape& shape, const planner::Cluster& cluster,
                        const planner::RunBudget& budget, double compute);
OrderedJson budget_json(const planner::RunBudget& budget);

}  // namespace capstan::cli
