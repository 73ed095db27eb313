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

// "850 us", "12.3 ms" or "1.25 s".
std::string seconds_text(double seconds);
// A part of a step as words: "pipeline bubble".
std::string part_name(const std::string& name);

// Recipe and cluster, as the first line of a plan; and its layout.
std::string title_text(const std::string& recipe, const planner::Plan& plan);
std::string layout_text(const planner::RunShape& shape);

}  // namespace capstan::cli
