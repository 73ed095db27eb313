// A plan as one HTML page that needs nothing else: whether it fits, memory by stage, parts of the step, the
// pipeline, the Pareto front, and the alternatives.
#pragma once

#include <string>

#include "base/json.hpp"

namespace capstan::cli {

struct PlanPage {
  // Two lines about the run: recipe and cluster; the layout.
  std::string title, subtitle;
  // plan_json(), search_json() and links_json(); budget_json() or null.
  OrderedJson plan, search, links, budget;
  // timeline_svg()
  std::string timeline;
};
std::string plan_page_html(const PlanPage& page);

}  // namespace capstan::cli
