#include "train/trainer/profile.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"

namespace capstan::train {

namespace {

enum Lane : int { kPhaseLane, kForwardLane, kBackwardLane, kWeightLane, kTransferLane };
constexpr std::array<const char*, 5> kLaneNames{"phases", "forward", "backward", "weight gradients",
                                                "transfers"};
int lane_of(char phase) {
  switch (phase) {
    case 'F':
      return kForwardLane;
    case 'B':
      return kBackwardLane;
    case 'C':
      return kTransferLane;
    default:
      return kWeightLane;
  }
}

}  // namespace

void OperationTable::observe(const TapeEvent& event) {
  if (event.part) return;
  auto row = std::find_if(rows_.begin(), rows_.end(),
                          [&](const Row& r) { return r.phase == event.phase && r.name == event.name; });
  if (row == rows_.end()) row = rows_.insert(row, {event.name, event.phase});
  ++row->calls;
  row->seconds += event.seconds;
  row->cost.flops += event.cost.flops;
  row->cost.bytes += event.cost.bytes;
}

std::vector<OperationTable::Row> OperationTable::by_time() const {
  std::vector<Row> sorted = rows_;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Row& a, const Row& b) { return a.seconds > b.seconds; });
  return sorted;
}

void Trace::add(int lane, const std::string& name, double end, double seconds, const std::string& arguments) {
  const double begin = end - seconds;
  if (start_ < 0) start_ = begin;
  body_ += ",\n{\"ph\":\"X\",\"name\":" + in_quotes(name) + ",\"pid\":" + std::to_string(rank_) +
           ",\"tid\":" + std::to_string(lane) + ",\"ts\":" + fixed(1e6 * (begin - start_), 3) +
           ",\"dur\":" + fixed(1e6 * seconds, 3) + ",\"args\":{\"step\":" + std::to_string(step_) +
           arguments + "}}";
  ++events_;
}

void Trace::observe(const TapeEvent& event) {
  std::string arguments;
  if (event.cost.flops > 0) {
    arguments += ",\"flops\":" + fixed(event.cost.flops, 0);
    if (event.seconds > 0)
      arguments += ",\"gflops_per_second\":" + fixed(1e-9 * event.cost.flops / event.seconds, 2);
  }
  if (event.cost.bytes > 0) arguments += ",\"bytes\":" + fixed(event.cost.bytes, 0);
  if (event.cost.sent > 0) arguments += ",\"sent\":" + fixed(event.cost.sent, 0);
  if (event.saved_bytes > 0) arguments += ",\"saved_bytes\":" + std::to_string(event.saved_bytes);
  if (event.recomputed) arguments += ",\"recomputed\":true";
  if (shapes_ && !event.shapes.empty()) {
    arguments += ",\"shapes\":\"";
    for (size_t i = 0; i < event.shapes.size(); ++i) arguments += (i ? " " : "") + event.shapes[i].text();
    arguments += '"';
  }
  add(lane_of(event.phase), event.name, event.end, event.seconds, arguments);
}

void Trace::phase(Phase phase, double end, double seconds) {
  add(kPhaseLane, std::string(name_of(phase)), end, seconds, {});
}

void Trace::write(const std::filesystem::path& file) const {
  std::string head =
      "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" +
      std::to_string(rank_) + ",\"args\":{\"name\":\"rank " + std::to_string(rank_) + "\"}}";
  for (size_t lane = 0; lane < kLaneNames.size(); ++lane)
    head += ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":" + std::to_string(rank_) +
            ",\"tid\":" + std::to_string(lane) + ",\"args\":{\"name\":\"" + kLaneNames[lane] + "\"}}";
  std::error_code problem;
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path(), problem);
  FileWriter writer(file);
  writer.write(head);
  writer.write(body_);
  writer.write("\n]}\n");
  writer.finish(false);
}

}  // namespace capstan::train
