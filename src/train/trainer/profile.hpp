// Profile of a step: a table of its operations, and a trace of them for Perfetto or chrome://tracing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
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
// complete events in microseconds. Lanes: phases of the step (host), forward, backward and weight gradients,
// transfers (on a device that queues work: what the compute queue waits for them), and one lane for each
// further queue that was used. Each operation carries shapes, FLOPs, bytes, bytes sent to other ranks and its
// throughput. A trace does not change the order of the step's work; on a device that queues work, the times
// are those of events.
class Trace final : public TapeObserver {
 public:
  Trace(int rank, bool shapes);
  void observe(const TapeEvent& event) override;
  bool waits() const override { return false; }
  void queue_span(const QueueSpan& span) override;
  void phase(Phase phase, double end, double seconds);
  // Begins a step, after finish_step() of the previous one.
  void step(int64_t step);
  // Waits for the events of the observed work, and reads their times. The device must still exist.
  void finish_step();
  size_t events() const { return entries_.size(); }
  // Times count from now on. Otherwise they count from the first event.
  void start_clock();
  // Makes the directory; throws ErrorCode::io, and what finish_step() throws.
  void write(const std::filesystem::path& file);
  // The traces of all ranks in one file, which rank 0 writes; each rank is a process in it. Collective.
  void write(const std::filesystem::path& file, comm::Communicator& ranks);

 private:
  struct Entry {
    int lane;
    int64_t step;
    std::string name;
    // Host clock.
    double begin, seconds;
    double flops;
    // JSON members, each after a comma.
    std::string arguments;
    // Events that give `begin` and `seconds` once the work is done.
    std::shared_ptr<Event> before, after;
  };
  static std::string text_of(const Entry& entry, int rank, double start);
  // Begins with the name of this rank's process; without the brackets of the list of events.
  std::string text();

  int rank_;
  bool shapes_;
  int64_t step_ = 0;
  // Host clock.
  std::optional<double> start_;
  std::vector<std::string> lanes_;
  std::vector<Entry> entries_;
  // Number of entries that have times.
  size_t resolved_ = 0;
};

}  // namespace capstan::train
