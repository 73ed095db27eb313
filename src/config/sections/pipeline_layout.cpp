#include "config/sections/pipeline_layout.hpp"

#include "base/text.hpp"

namespace capstan::config {

namespace {

// Limits of an expanded layout, and of the nesting of its parentheses.
constexpr size_t kMaxItems = 1 << 20;
constexpr int kMaxNesting = 8;

// Recursive descent over the text; `out` is the expanded layout, one character for each item.
class LayoutReader {
 public:
  explicit LayoutReader(std::string_view text) : text_(text) {}

  std::string expand() {
    std::string out;
    items(out, 0);
    if (problem_.empty() && at_ < text_.size()) stop("`)` without `(`", at_);
    return out;
  }
  const std::string& problem() const { return problem_; }

 private:
  void items(std::string& out, int depth) {
    while (problem_.empty() && at_ < text_.size() && text_[at_] != ')') {
      const char c = text_[at_];
      const size_t start = at_++;
      if (c == ',' || c == ' ') continue;
      std::string item;
      if (c == '(') {
        if (depth == kMaxNesting) return stop("brackets nested deeper than 8", start);
        items(item, depth + 1);
        if (!problem_.empty()) return;
        if (at_ == text_.size()) return stop("`(` without `)`", start);
        ++at_;
      } else if (c == 'E' || c == 't' || c == 'm' || c == 'L' || c == '|') {
        item = c;
      } else {
        return stop("`" + std::string(1, c) + "` is none of E t m L | ( ) *", start);
      }
      const int64_t times = repetition();
      if (!problem_.empty()) return;
      if (item.size() * static_cast<size_t>(times) + out.size() > kMaxItems)
        return stop("more than 1048576 items", start);
      for (int64_t i = 0; i < times; ++i) out += item;
    }
  }

  int64_t repetition() {
    if (at_ == text_.size() || text_[at_] != '*') return 1;
    const size_t start = at_++;
    int64_t count = 0;
    bool any = false;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' &&
           count <= static_cast<int64_t>(kMaxItems)) {
      count = count * 10 + (text_[at_++] - '0');
      any = true;
    }
    if (!any || count == 0 || count > static_cast<int64_t>(kMaxItems)) {
      stop("`*` needs a count from 1 to 1048576", start);
      return 1;
    }
    return count;
  }

  void stop(std::string why, size_t at) {
    if (problem_.empty()) problem_ = why + " (character " + std::to_string(at + 1) + ")";
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string problem_;
};

std::string stage_text(const PipelineStage& stage) {
  std::string text;
  const auto repeat = [&text](char item, int64_t count) {
    if (count == 0) return;
    text += item;
    if (count == 2) text += item;
    if (count > 2) text += "*" + std::to_string(count);
  };
  repeat('E', stage.embedding ? 1 : 0);
  repeat('t', stage.layers);
  repeat('m', stage.mtp_layers);
  repeat('L', stage.loss ? 1 : 0);
  return text;
}

}  // namespace

PipelineLayout parse_pipeline_layout(std::string_view text) {
  PipelineLayout layout;
  LayoutReader reader(text);
  const std::string items = reader.expand();
  layout.problem = reader.problem();
  if (!layout.ok()) return layout;
  layout.stages.emplace_back();
  int64_t embeddings = 0, losses = 0, seen = 0, predicted = 0;
  const auto bad = [&layout](const char* why) {
    if (layout.problem.empty()) layout.problem = why;
  };
  for (const char c : items) {
    PipelineStage& stage = layout.stages.back();
    if (c == '|') {
      layout.stages.emplace_back();
      continue;
    }
    if (c != 'L' && losses > 0) bad("`L` has to be the last item");
    if (c == 'E') {
      if (seen > 0) bad("`E` has to be the first item, once");
      if (layout.stages.size() > 1) bad("`E` has to be in the first stage");
      stage.embedding = true;
      ++embeddings;
    } else if (c == 't') {
      if (predicted > 0) bad("no layer `t` may follow a predicted token `m`");
      ++stage.layers;
    } else if (c == 'm') {
      if (predicted > 0 && stage.mtp_layers == 0) bad("all `m` have to be in one stage");
      ++stage.mtp_layers;
      ++predicted;
    } else {
      if (losses > 0) bad("`L` must occur exactly once");
      stage.loss = true;
      ++losses;
    }
    ++seen;
  }
  if (embeddings == 0) bad("`E` (the embedding) is missing");
  if (losses == 0) bad("`L` (head and loss) is missing");
  if (!layout.stages.back().loss) bad("`L` has to be in the last stage");
  return layout;
}

std::string pipeline_layout_text(const std::vector<PipelineStage>& stages) {
  std::string text;
  for (size_t i = 0; i < stages.size();) {
    size_t equal = 1;
    while (i + equal < stages.size() && stages[i + equal] == stages[i]) ++equal;
    const bool last = i + equal == stages.size();
    const std::string one = stage_text(stages[i]);
    // Number of equal stages that a bar follows.
    const size_t repeated = last ? equal - 1 : equal;
    if (repeated > 2) {
      text += "(" + one + "|)*" + std::to_string(repeated);
    } else {
      for (size_t k = 0; k < repeated; ++k) text += one + "|";
    }
    if (last) text += one;
    i += equal;
  }
  return text;
}

std::optional<std::vector<PipelineStage>> pipeline_stages(const Config& config) {
  const DistConfig& d = config.dist;
  const int64_t pp = d.pipeline_model_parallel_size;
  const int64_t vpp = d.virtual_pipeline_model_parallel_size.value_or(1);
  if (d.pipeline_model_parallel_layout && pp > 1) {
    PipelineLayout layout = parse_pipeline_layout(*d.pipeline_model_parallel_layout);
    if (!layout.ok()) return std::nullopt;
    return std::move(layout.stages);
  }
  if (pp > config.model.num_layers + 2 || vpp > config.model.num_layers + 2) return std::nullopt;

  // Layers, embedding and loss counted where asked for.
  std::vector<int64_t> of_rank(static_cast<size_t>(pp));
  const auto first = pp > 1 ? d.num_layers_in_first_pipeline_stage : std::nullopt,
             last = pp > 1 ? d.num_layers_in_last_pipeline_stage : std::nullopt;
  if (first || last) {
    const int64_t middle_layers = config.model.num_layers - first.value_or(0) - last.value_or(0);
    const int64_t middle_stages = pp - (first ? 1 : 0) - (last ? 1 : 0);
    if (middle_layers < 0 || (middle_stages == 0) != (middle_layers == 0)) return std::nullopt;
    if (middle_stages > 0 && middle_layers % middle_stages != 0) return std::nullopt;
    for (auto& n : of_rank) n = middle_stages > 0 ? middle_layers / middle_stages : 0;
    if (first) of_rank.front() = *first;
    if (last) of_rank.back() = *last;
  } else {
    const int64_t units = config.model.num_layers + (d.account_for_embedding_in_pipeline_split ? 1 : 0) +
                          (d.account_for_loss_in_pipeline_split ? 1 : 0);
    if (units % pp != 0) return std::nullopt;
    for (auto& n : of_rank) n = units / pp;
  }
  std::vector<PipelineStage> stages(static_cast<size_t>(pp * vpp));
  for (int64_t rank = 0; rank < pp; ++rank) {
    const int64_t layers = of_rank[static_cast<size_t>(rank)];
    if (layers % vpp != 0) return std::nullopt;
    for (int64_t chunk = 0; chunk < vpp; ++chunk)
      stages[static_cast<size_t>(chunk * pp + rank)].layers = layers / vpp;
  }
  stages.front().embedding = true;
  stages.back().loss = true;
  stages.back().mtp_layers = config.model.mtp_num_layers.value_or(0);
  if (!first && !last) {
    if (d.account_for_embedding_in_pipeline_split) --stages.front().layers;
    if (d.account_for_loss_in_pipeline_split) --stages.back().layers;
    if (stages.front().layers < 0 || stages.back().layers < 0) return std::nullopt;
  }
  return stages;
}

std::vector<int64_t> stage_ranks(std::optional<PipelineSchedule> schedule, int64_t ranks, int64_t chunks) {
  std::vector<int64_t> result;
  for (int64_t stage = 0; stage < ranks * chunks; ++stage) {
    const bool up = schedule == PipelineSchedule::zb_v && stage / ranks % 2 == 1;
    result.push_back(up ? ranks - 1 - stage % ranks : stage % ranks);
  }
  return result;
}

std::vector<int64_t> stage_ranks(const DistConfig& dist) {
  return stage_ranks(dist.pipeline_schedule, dist.pipeline_model_parallel_size,
                     dist.virtual_pipeline_model_parallel_size.value_or(1));
}

bool layout_is_the_split(const Config& config) {
  if (!config.dist.pipeline_model_parallel_layout) return true;
  Config split = config;
  split.dist.pipeline_model_parallel_layout.reset();
  const auto stages = pipeline_stages(split);
  return stages && pipeline_layout_text(*stages) == *config.dist.pipeline_model_parallel_layout;
}

}  // namespace capstan::config
