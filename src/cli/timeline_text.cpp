#include "cli/timeline_text.hpp"

#include <algorithm>
#include <array>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/plan_text.hpp"
#include "cli/table.hpp"

namespace capstan::cli {

namespace {

using planner::Span;
using planner::Timeline;

// The schedule with the shortest action as one column, so that the trainer's diagram can draw it.
std::string diagram(const planner::RunShape& shape, const planner::Cluster& cluster, int64_t columns) {
  const parallel::PipelineShape pipeline = planner::pipeline_of(shape);
  std::vector<parallel::ActionTicks> ticks =
      planner::action_ticks(pipeline, planner::stage_times(shape, cluster));
  int64_t unit = ticks.front().forward;
  for (const auto& stage : ticks) unit = std::min(unit, stage.forward);
  unit = std::max<int64_t>(unit, 1);
  for (auto& stage : ticks) {
    const auto scale = [&](int64_t& length) {
      if (length > 0) length = std::max<int64_t>(1, (length + unit / 2) / unit);
    };
    scale(stage.forward), scale(stage.backward), scale(stage.weight_gradients);
  }
  const parallel::Schedule schedule = parallel::make_schedule(pipeline);
  const auto run = parallel::simulate(pipeline, schedule, ticks);
  return "\npipeline of a step, a column for each " + seconds_text(1e-9 * static_cast<double>(unit)) +
         ": 0 is the forward pass of micro-batch 0, [0] its backward pass" +
         (pipeline.separates_weight_gradients() ? " (input gradients), w0 its weight gradients" : "") +
         (pipeline.chunks > 1 ? ", with a letter for the chunk" : "") + "; . is idle\n" +
         parallel::draw(pipeline, schedule, run, columns);
}

std::string ranks_table(const Timeline& timeline) {
  std::array<std::string_view, 3> kinds{"forward", "backward", "weight gradients"};
  Table table;
  table.add(
      {"rank", "forward", "backward", "weight gradients", "of which communication", "idle", "of the step"});
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    std::array<double, 3> sums{};
    double communication = 0;
    for (const Span& span : timeline.ranks[rank]) {
      const auto kind = static_cast<size_t>(span.kind);
      if (kind < kinds.size()) sums[kind] += span.end - span.begin;
      communication += span.communication;
    }
    const double idle = timeline.idle[rank];
    table.add({std::to_string(rank), seconds_text(sums[0]), seconds_text(sums[1]),
               sums[2] > 0 ? seconds_text(sums[2]) : "", seconds_text(communication), seconds_text(idle),
               fixed(100 * idle / timeline.seconds, 1) + "%"});
  }
  return "\ntime of each pipeline rank, and what it waits for others:\n" + table.text();
}

std::string links_table(const planner::Plan& plan) {
  const auto traffic = planner::link_traffic(plan.shape, plan.cluster, plan.time);
  if (traffic.empty()) return {};
  Table table;
  table.add({"part", "fast domain", "network", "seconds", "hidden"});
  const auto bytes = [](double count) { return count < 1 ? std::string() : human_bytes(count); };
  const auto seconds = [](double time) { return time < 5e-7 ? std::string() : seconds_text(time); };
  for (const auto& one : traffic)
    table.add({part_name(one.part), bytes(one.fast_bytes), bytes(one.network_bytes), seconds(one.exposed),
               seconds(one.hidden)});
  return "\nbytes that one GPU sends in a step, by link:\n" + table.text();
}

std::string label_of(const Span& span) {
  std::string text(planner::name_of(span.kind));
  if (span.kind > Span::Kind::weight_gradients) return text;
  return text + " of micro-batch " + std::to_string(span.micro_batch) + ", chunk " +
         std::to_string(span.chunk);
}

}  // namespace

std::string timeline_text(const planner::Plan& plan, const Timeline& timeline, int64_t columns) {
  return diagram(plan.shape, plan.cluster, columns) + ranks_table(timeline) + links_table(plan);
}

OrderedJson links_json(const planner::Plan& plan) {
  OrderedJson list = OrderedJson::array();
  for (const auto& one : planner::link_traffic(plan.shape, plan.cluster, plan.time))
    list.push_back({{"part", one.part},
                    {"fast_bytes", one.fast_bytes},
                    {"network_bytes", one.network_bytes},
                    {"seconds", one.exposed},
                    {"hidden_seconds", one.hidden}});
  return list;
}

std::string timeline_trace(const Timeline& timeline) {
  OrderedJson events = OrderedJson::array();
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    events.push_back({{"ph", "M"},
                      {"pid", 0},
                      {"tid", rank},
                      {"name", "thread_name"},
                      {"args", {{"name", "pipeline rank " + std::to_string(rank)}}}});
    for (const Span& span : timeline.ranks[rank]) {
      OrderedJson event = {{"ph", "X"},
                           {"pid", 0},
                           {"tid", rank},
                           {"name", std::string(planner::name_of(span.kind))},
                           {"ts", 1e6 * span.begin},
                           {"dur", 1e6 * (span.end - span.begin)}};
      if (span.kind <= Span::Kind::weight_gradients)
        event["args"] = {{"micro_batch", span.micro_batch},
                         {"chunk", span.chunk},
                         {"communication_us", 1e6 * span.communication}};
      events.push_back(std::move(event));
    }
  }
  const OrderedJson trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  return dump_json(trace) + "\n";
}

namespace {

constexpr double kRowHeight = 22, kTop = 26, kLeft = 64, kRight = 12;
// The rules name the picture, because it also stands in pages that have their own.
constexpr const char* kStyle =
    "<style>.step .f{fill:#2563c9}.step .b{fill:#0b8a5f}.step .w{fill:#a67c00}.step .d{fill:#b02a8f}"
    ".step .u{fill:#7048c6}.step .o{fill:#6b6f76}.step .c{fill:#d9480f}.step .i{fill:#e3e6ec}"
    ".step text{font:11px system-ui,sans-serif;fill:#1d2430}"
    "@media(prefers-color-scheme:dark){.step .i{fill:#2c333f}.step text{fill:#e6e9ef}}</style>\n";

std::string svg_rect(const char* style, double x, double y, double width, double height) {
  return "<rect class=\"" + std::string(style) + "\" x=\"" + fixed(x, 2) + "\" y=\"" + fixed(y, 1) +
         "\" width=\"" + fixed(width, 2) + "\" height=\"" + fixed(height, 1) + "\"";
}

std::string words_at(double x, double y, const std::string& words) {
  return "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\">" + words + "</text>\n";
}

// The colors and their meaning, in one line at `y`.
std::string legend(double y) {
  static constexpr std::array<std::pair<const char*, const char*>, 8> kColors{{{"f", "forward"},
                                                                               {"b", "backward"},
                                                                               {"w", "weight gradients"},
                                                                               {"c", "communication in it"},
                                                                               {"d", "data parallel"},
                                                                               {"u", "optimizer"},
                                                                               {"o", "other"},
                                                                               {"i", "idle"}}};
  std::string text;
  double x = kLeft;
  for (const auto& [style, name] : kColors) {
    text += svg_rect(style, x, y - 9, 10, 10) + "/>\n" + words_at(x + 14, y, name);
    x += 30 + 6.5 * static_cast<double>(std::string_view(name).size());
  }
  return text;
}

}  // namespace

std::string timeline_svg(const Timeline& timeline) {
  static constexpr std::array kStyles{"f", "b", "w", "d", "u", "o"};
  size_t most = 0;
  for (const auto& spans : timeline.ranks) most = std::max(most, spans.size());
  // Wide enough to see each action, up to a width that viewers take.
  const double inside = std::clamp(5.0 * static_cast<double>(most), 1100.0, 12'000.0);
  const double width = kLeft + inside + kRight,
               height = kTop + kRowHeight * static_cast<double>(timeline.ranks.size()) + 34;
  const double scale = inside / timeline.seconds;
  std::string text = "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"step\" width=\"" + fixed(width, 0) +
                     "\" height=\"" + fixed(height, 0) + "\" viewBox=\"0 0 " + fixed(width, 0) + " " +
                     fixed(height, 0) + "\">\n" + kStyle + legend(14);
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    const double y = kTop + kRowHeight * static_cast<double>(rank);
    text += words_at(4, y + 14, "rank " + std::to_string(rank));
    text += svg_rect("i", kLeft, y, inside, kRowHeight - 4) + "/>\n";
    for (const Span& span : timeline.ranks[rank]) {
      const double x = kLeft + scale * span.begin, length = scale * (span.end - span.begin);
      text += svg_rect(kStyles[static_cast<size_t>(span.kind)], x, y, std::max(0.1, length - 0.4),
                       kRowHeight - 4) +
              "><title>" + label_of(span) + ": " + seconds_text(span.end - span.begin) + "</title></rect>\n";
      if (const double part = scale * span.communication; part >= 0.2)
        text += svg_rect("c", x + length - part - 0.4, y + kRowHeight - 8, part, 4) + "/>\n";
    }
  }
  const double y = height - 12;
  for (int i = 0; i <= 10; ++i)
    text +=
        words_at(kLeft + inside * i / 10 - (i == 10 ? 44 : 0), y, seconds_text(timeline.seconds * i / 10));
  return text + "</svg>\n";
}

}  // namespace capstan::cli
