// metrics.jsonl: one JSON object per logged step, other rows carry `event`. Numbers are written with the
// digits that read back as the same number, and as null if they are not finite. When write() returns, the
// row has been passed to the system.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>
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
  // The caller ensures that the names in one row differ.
  MetricsRow& number(std::string_view name, double value);
  // Writes the digits of the float, not of the same value as double.
  MetricsRow& number(std::string_view name, float value);
  MetricsRow& numbers(std::string_view name, std::span<const double> values);
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
  // Opens the file for appending, and creates it if it does not exist.
  explicit MetricsWriter(const std::filesystem::path& path);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  // Throws ErrorCode::io, for example when the disk is full, and then removes what it wrote of the row.
  void write(const MetricsRow& row);
  // Called with each checkpoint, so that the rows up to it survive a power failure.
  void sync();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

// Before a resume from `step`: removes the first row with a larger step and everything after it, and a last
// line that was torn. Returns the number of lines removed. A file that does not exist has nothing to remove.
int64_t truncate_after_step(const std::filesystem::path& path, int64_t step);

struct ReadRow {
  std::optional<int64_t> step;
  // Name of the event. Empty: a row of a logged step.
  std::string event;
  // Values of the numeric keys except `step`. Null is read as NaN, a boolean as 0 or 1.
  std::vector<std::pair<std::string, double>> numbers;
  // Values of the keys with lists of numbers. Null is read as NaN.
  std::vector<std::pair<std::string, std::vector<double>>> lists;
  // Values of the text keys except `event`.
  std::vector<std::pair<std::string, std::string>> texts;
  // Returns NaN if there is no number of that name.
  double number(std::string_view name) const;
  // Memory of the device in a logged step, in bytes; NaN if the row has none. Rows of earlier versions count
  // the scratch memory of kernels by itself, and it is added.
  double memory_bytes() const;
};

// Calls `use` for each row in order. Incomplete and damaged lines are skipped; the result is their
// number. Throws ErrorCode::not_found when there is no such file.
int64_t read_metrics(const std::filesystem::path& path, FunctionRef<void(const ReadRow&)> use);

// The last row that logs a step, found from the end of the file (its last 4 MiB); nullopt when there is
// none.
std::optional<ReadRow> last_logged_step(const std::filesystem::path& path);

// The last row of any kind. Its step is the latest that the run has reached.
std::optional<ReadRow> last_recorded_step(const std::filesystem::path& path);

// The last row of that event in the file, which is read in full; nullopt when there is none.
std::optional<ReadRow> last_event(const std::filesystem::path& path, std::string_view event);

}  // namespace capstan::records
