// What a step consists of: a table of its operations, and a trace of them for Perfetto or chrome://tracing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ops/tape.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

// Operations by name and phase, added up. An observed step waits for each operation's end: on devices that
// queue kernels it is the slower for it, and the times are the kernels'.
class OperationTable final : public TapeObserver {
 public:
  struct Row {
    std::string name;
    char phase;  // 'F', 'B', 'W'
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
  };
  void observe(const TapeEvent& event) override;
  void clear() { rows_.clear(); }
  std::vector<Row> by_time() const;  // the longest first

 private:
  std::vector<Row> rows_;
};

// Chrome's trace format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
// complete events in microseconds. Lanes: phases of the step, forward, backward, weight gradients, transfers.
// Each operation carries shapes, FLOPs, bytes, bytes sent to other ranks and the rate it reached.
class Trace final : public TapeObserver {
 public:
  Trace(int rank, bool shapes) : rank_(rank), shapes_(shapes) {}
  void observe(const TapeEvent& event) override;
  void phase(Phase phase, double end, double seconds);
  void step(int64_t step) { step_ = step; }
  size_t events() const { return events_; }
  // Makes the directory; throws ErrorCode::io.
  void write(const std::filesystem::path& file) const;

 private:
  void add(int lane, const std::string& name, double end, double seconds, const std::string& arguments);
  int rank_;
  bool shapes_;
  int64_t step_ = 0;
  double start_ = -1;  // of the first event, as time zero
  size_t events_ = 0;
  std::string body_;
};

}  // namespace capstan::train
