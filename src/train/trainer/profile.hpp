// Profile of a step: a table of its operations, and a trace of them for Perfetto or chrome://tracing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ops/tape.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

// Sums of the operations by name and phase. An observed step waits for the end of each operation. On devices
// that queue kernels the step is therefore slower, and the times are those of the kernels.
class OperationTable final : public TapeObserver {
 public:
  struct Row {
    std::string name;
    // 'F' (forward), 'B' (backward) or 'W' (weight gradients).
    char phase;
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
  };
  void observe(const TapeEvent& event) override;
  void clear() { rows_.clear(); }
  // The rows, longest time first.
  std::vector<Row> by_time() const;

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
  // Time of the first event, from which the trace counts.
  double start_ = -1;
  size_t events_ = 0;
  std::string body_;
};

}  // namespace capstan::train
