// A plan as text and as JSON.
#pragma once

#include <string>
#include <vector>

#include "base/json.hpp"
#include "planner/changes.hpp"
#include "planner/search.hpp"

namespace capstan::cli {

// recipe: its name. A plan is one screen: whether it fits, the speed, memory by stage, parts of the step,
// limits and changes.
std::string plan_text(const std::string& recipe, const planner::Plan& plan,
                      const std::vector<planner::Change>& changes);

// capstan.plan/1
OrderedJson plan_json(const std::string& recipe, const planner::Plan& plan,
                      const std::vector<planner::Change>& changes);

// The layouts of a search: a table of the best, the overrides of the first, and why the others are slower.
std::string search_text(const std::string& recipe, const planner::Cluster& cluster,
                        const planner::SearchResult& result);
OrderedJson search_json(const std::string& recipe, const planner::Cluster& cluster,
                        const planner::SearchResult& result);

// "dist.tp=4 train.global_batch_size=512", quoted for a shell where needed.
std::string overrides_text(const std::vector<std::string>& overrides);

}  // namespace capstan::cli
