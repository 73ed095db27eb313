// metrics.jsonl: one JSON object per logged step, other rows carry `event`. Numbers have the digits that read
// back as the same number; one that is not finite is null. A row is on its way to the disk when write()
// returns.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"

namespace capstan::records {

class MetricsRow {
 public:
  explicit MetricsRow(int64_t step) { integer("step", step); }
  MetricsRow(int64_t step, std::string_view event) : MetricsRow(step) { text("event", event); }
  // Names of one row differ; the caller sees to it.
  MetricsRow& number(std::string_view name, double value);
  MetricsRow& number(std::string_view name, float value);  // the digits of a float, not of its double
  MetricsRow& integer(std::string_view name, int64_t value);
  MetricsRow& boolean(std::string_view name, bool value);
  MetricsRow& text(std::string_view name, std::string_view value);
  std::string line() const { return "{" + body_ + "}\n"; }

 private:
  MetricsRow& raw(std::string_view name, std::string_view value);
  std::string body_;
};

class MetricsWriter {
 public:
  explicit MetricsWriter(const std::filesystem::path& path);  // appends; made when it is not there
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  // Throws ErrorCode::io (a full disk) and then leaves no half row behind.
  void write(const MetricsRow& row);
  void sync();  // with a checkpoint, so that the rows up to it survive a power cut

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

// Before a resume from `step`: removes the first row with a larger step and everything behind it, and a last
// line that was torn. Returns the number of lines removed. A file that does not exist has nothing to remove.
int64_t truncate_after_step(const std::filesystem::path& path, int64_t step);

struct ReadRow {
  std::optional<int64_t> step;
  std::string event;  // empty: a logged step
  // Null: NaN; booleans: 0 or 1; `step` is not among them.
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<std::pair<std::string, std::string>> texts;  // without `event`
  double number(std::string_view name) const;              // NaN when it is not there
};

// Calls `use` for each row in order. Lines that are no such object (torn, damaged) are skipped and counted in
// the result. Throws ErrorCode::not_found when there is no such file.
int64_t read_metrics(const std::filesystem::path& path, FunctionRef<void(const ReadRow&)> use);

// The last row that logs a step, found from the end of the file (its last 256 KiB); nullopt when there is
// none.
std::optional<ReadRow> last_logged_step(const std::filesystem::path& path);

// The last row of any kind, whose step is how far the run has come.
std::optional<ReadRow> last_recorded_step(const std::filesystem::path& path);

// The last row of that event in the whole file; nullopt when there is none.
std::optional<ReadRow> last_event(const std::filesystem::path& path, std::string_view event);

}  // namespace capstan::records
