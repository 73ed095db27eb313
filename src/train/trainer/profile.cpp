#include "train/trainer/profile.hpp"

#include <algorithm>
#include <array>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "comm/collective_errors.hpp"

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
  if (event.nested) return;
  auto row = std::find_if(rows_.begin(), rows_.end(),
                          [&](const Row& r) { return r.phase == event.phase && r.name == event.name; });
  if (row == rows_.end()) row = rows_.insert(row, {event.name, event.phase});
  ++row->calls;
  row->seconds += event.self_seconds;
  row->cost.flops += event.cost.flops;
  row->cost.bytes += event.cost.bytes;
}

std::vector<OperationTable::Row> OperationTable::by_time() const {
  std::vector<Row> sorted = rows_;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Row& a, const Row& b) { return a.seconds > b.seconds; });
  return sorted;
}

Trace::Trace(int rank, bool shapes)
    : rank_(rank), shapes_(shapes), lanes_(kLaneNames.begin(), kLaneNames.end()) {}

void Trace::observe(const TapeEvent& event) {
  std::string arguments;
  if (event.cost.bytes > 0) arguments += ",\"bytes\":" + fixed(event.cost.bytes, 0);
  if (event.cost.sent_bytes > 0) arguments += ",\"sent\":" + fixed(event.cost.sent_bytes, 0);
  if (event.saved_bytes > 0) arguments += ",\"saved_bytes\":" + std::to_string(event.saved_bytes);
  if (event.recomputed) arguments += ",\"recomputed\":true";
  if (shapes_ && !event.shapes.empty()) {
    arguments += ",\"shapes\":\"";
    for (size_t i = 0; i < event.shapes.size(); ++i) arguments += (i ? " " : "") + event.shapes[i].text();
    arguments += '"';
  }
  entries_.push_back({lane_of(event.phase), step_, event.name, event.end_seconds - event.self_seconds,
                      event.self_seconds, event.cost.flops, std::move(arguments), event.before, event.after});
}

void Trace::queue_span(const QueueSpan& span) {
  auto lane = std::find(lanes_.begin(), lanes_.end(), span.queue);
  if (lane == lanes_.end()) lane = lanes_.insert(lane, span.queue);
  entries_.push_back(
      {static_cast<int>(lane - lanes_.begin()), step_, span.name, 0, 0, 0, {}, span.before, span.after});
}

void Trace::phase(Phase phase, double end, double seconds) {
  entries_.push_back({kPhaseLane, step_, std::string(name_of(phase)), end - seconds, seconds, 0, {}, {}, {}});
}

void Trace::step(int64_t step) {
  finish_step();
  step_ = step;
}

void Trace::finish_step() {
  for (; resolved_ < entries_.size(); ++resolved_) {
    Entry& entry = entries_[resolved_];
    if (!entry.after) continue;
    entry.before->wait();
    entry.after->wait();
    entry.begin = entry.before->time();
    entry.seconds = entry.after->time() - entry.begin;
    entry.before = entry.after = nullptr;
  }
}

std::string Trace::text_of(const Entry& entry, int rank, double start) {
  std::string text =
      ",\n{\"ph\":\"X\",\"name\":" + in_quotes(entry.name) + ",\"pid\":" + std::to_string(rank) +
      ",\"tid\":" + std::to_string(entry.lane) + ",\"ts\":" + fixed(1e6 * (entry.begin - start), 3) +
      ",\"dur\":" + fixed(1e6 * entry.seconds, 3) + ",\"args\":{\"step\":" + std::to_string(entry.step);
  if (entry.flops > 0) {
    text += ",\"flops\":" + fixed(entry.flops, 0);
    if (entry.seconds > 0) text += ",\"gflops_per_second\":" + fixed(1e-9 * entry.flops / entry.seconds, 2);
  }
  return text + entry.arguments + "}}";
}

void Trace::start_clock() {
  start_ = steady_seconds();
}

std::string Trace::text() {
  finish_step();
  const std::string process = std::to_string(rank_);
  std::string text = "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" + process +
                     ",\"args\":{\"name\":\"rank " + process + "\"}}";
  for (size_t lane = 0; lane < lanes_.size(); ++lane)
    text += ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":" + process +
            ",\"tid\":" + std::to_string(lane) + ",\"args\":{\"name\":" + in_quotes(lanes_[lane]) + "}}";
  const auto first = std::ranges::min_element(entries_, {}, &Entry::begin);
  for (const Entry& entry : entries_) text += text_of(entry, rank_, start_.value_or(first->begin));
  return text;
}

namespace {
void write_events(const std::filesystem::path& file, const std::string& events) {
  std::error_code problem;
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path(), problem);
  FileWriter writer(file);
  writer.write("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  writer.write(events);
  writer.write("\n]}\n");
  writer.finish(false);
}
}  // namespace

void Trace::write(const std::filesystem::path& file) {
  write_events(file, text());
}

void Trace::write(const std::filesystem::path& file, comm::Communicator& ranks) {
  std::string all = text();
  auto bytes = static_cast<int64_t>(all.size());
  if (ranks.rank() > 0) {
    ranks.start_send(&bytes, sizeof bytes, 0)->wait();
    ranks.start_send(all.data(), bytes, 0)->wait();
  } else {
    for (int rank = 1; rank < ranks.size(); ++rank) {
      ranks.start_receive(&bytes, sizeof bytes, rank)->wait();
      std::string other(static_cast<size_t>(bytes), ' ');
      ranks.start_receive(other.data(), bytes, rank)->wait();
      all += ",\n" + other;
    }
  }
  comm::run_collectively(ranks, "writing the trace", [&] {
    if (ranks.rank() == 0) write_events(file, all);
  });
}

}  // namespace capstan::train
