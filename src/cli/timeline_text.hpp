// The simulated pipeline of a step as text, Chrome trace and SVG.
#pragma once

#include <string>

#include "base/json.hpp"
#include "planner/pipeline.hpp"
#include "planner/plan.hpp"

namespace capstan::cli {

// A diagram `columns` wide, what each rank waits, and the bytes of a step by link.
std::string timeline_text(const planner::Plan& plan, const planner::Timeline& timeline, int64_t columns);

// Bytes and seconds of a step by link.
OrderedJson links_json(const planner::Plan& plan);

// For chrome://tracing and ui.perfetto.dev: a row for each pipeline rank.
std::string timeline_trace(const planner::Timeline& timeline);

// A picture with a row for each pipeline rank; its colors follow the light or dark scheme of the reader.
std::string timeline_svg(const planner::Timeline& timeline);

}  // namespace capstan::cli
