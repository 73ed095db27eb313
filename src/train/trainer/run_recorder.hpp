// The records that a run keeps in its directory: run.json and the recipe, metrics.jsonl, TensorBoard events.
#pragma once

#include <chrono>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/records/events.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_dir.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// Returns options.run_dir, or runs/NAME without it. Throws ErrorCode::config if the recipe's name cannot name
// a directory.
std::filesystem::path run_directory(const RunOptions& options);

// Only rank 0 writes. On other ranks the writing functions do nothing; functions marked collective are for
// all ranks.
class RunRecorder {
 public:
  // Collective. Chooses the run directory; with Resume::existing it must hold a run. Writes nothing.
  RunRecorder(const config::Config& config, comm::World& world, const RunOptions& options, RunLog& log);

  // Collective. Locks the directory, and creates it for a new run.
  void open();
  // Collective. Records this start: recipe, command, version. A start that is refused before this call
  // does not change the directory.
  void begin(const records::RunRecords& start);
  // Opens metrics and events for a run that continues after `step`. Rows of later steps are removed.
  void open_metrics(int64_t step);
  // Removes the rows of the steps after `step`, and hides their events.
  void rewind(int64_t step);

  // A full disk does not end the run: rows wait until there is space, with a warning every half minute.
  void write(const records::MetricsRow& row);
  void write_events(int64_t step, std::span<const records::Scalar> scalars,
                    std::span<const records::Histogram> histograms = {});
  bool has_events() const { return events_ != nullptr; }
  // Flushes the written rows to the disk.
  void sync();
  void end(records::RunEnd how, const std::string& reason);

  const std::filesystem::path& directory() const { return directory_; }
  const std::string& run_id() const { return run_id_; }
  bool begun() const { return begun_; }
  // On rank 0: whether the directory held the run before this start, and where that run saved its
  // checkpoints.
  bool resumed() const { return run_ && run_->resumed(); }
  std::filesystem::path earlier_checkpoints() const;
  // On rank 0: mean time in seconds of a step at the last logged step. 0: not known.
  double logged_step_seconds() const;

 private:
  void open_events(std::optional<int64_t> resumed_at);

  const config::Config& config_;
  comm::World& world_;
  const RunOptions& options_;
  RunLog& log_;
  std::filesystem::path directory_;
  std::string run_id_;
  // Null except on rank 0.
  std::unique_ptr<records::RunDirectory> run_;
  std::unique_ptr<records::MetricsWriter> metrics_;
  std::unique_ptr<records::EventsWriter> events_;
  bool begun_ = false;
  // Rows that could not be written because the disk is full, oldest first.
  std::deque<records::MetricsRow> unwritten_;
  std::chrono::steady_clock::time_point last_warning_;
};

}  // namespace capstan::train
