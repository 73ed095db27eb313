// Which layers each pipeline stage holds: the layout grammar, and the split that follows from the sizes in
// `dist`.
//
//   layout = items, stages separated by "|"; commas and blanks are for the eye
//   item   = ("E" | "t" | "m" | "L" | "|" | "(" layout ")") [ "*" count ]
//
// stage_ranks() says which pipeline rank holds which stage.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/sections/config.hpp"

namespace capstan::config {

struct PipelineStage {
  bool embedding = false;
  int64_t layers = 0;
  int64_t mtp_layers = 0;
  bool loss = false;
  bool operator==(const PipelineStage&) const = default;
};

struct PipelineLayout {
  // The stages in the order of the forward pass.
  std::vector<PipelineStage> stages;
  // Empty, or why the text is not a layout (with the character's position, from 1)
  std::string problem;
  bool ok() const { return problem.empty(); }
};

// Checks the grammar, that E comes first and once, L last and once, and that no layer follows a predicted
// token.
PipelineLayout parse_pipeline_layout(std::string_view text);
// Shortest form with repetitions.
std::string pipeline_layout_text(const std::vector<PipelineStage>& stages);

// All PP * VPP stages of a resolved recipe, from the layout or from the split rules; nothing when they do not
// fit.
std::optional<std::vector<PipelineStage>> pipeline_stages(const Config& config);

// The pipeline rank of each of the PP * VPP stages i: i % PP, and for zb_v first down, then up:
// 0 … PP - 1, PP - 1 … 0.
std::vector<int64_t> stage_ranks(std::optional<PipelineSchedule> schedule, int64_t ranks, int64_t chunks);
std::vector<int64_t> stage_ranks(const DistConfig& dist);

// Whether `pipeline_model_parallel_layout` is unset or equals the split that the sizes give.
bool layout_is_the_split(const Config& config);

}  // namespace capstan::config
