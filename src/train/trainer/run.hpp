// One training run from its recipe to its end, as the trainer's own files see it: trainer.cpp drives it, run_start.cpp makes or
// finds what it begins with, run_records.cpp says and writes what happens.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/reader.hpp"
#include "train/adapters/adapters.hpp"
#include "train/records/events.hpp"
#include "train/records/log_file.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_dir.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/loop.hpp"
#include "train/trainer/profile.hpp"
#include "train/trainer/run_schedule.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/trainer.hpp"

namespace capstan::train {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

inline double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Only rank 0 speaks. What it says is also in the run's log; what is said before there is one waits for it.
class RunLog {
 public:
  RunLog(ProgressSink& sink, bool speaks) : sink_(sink), speaks_(speaks) {}
  void open_log(const fs::path& path) {
    log_ = std::make_unique<records::LogFile>(path);
    for (const std::string& text : std::exchange(unlogged_, {})) log_->line(text);
  }
  void log_only(const std::string& text) {
    if (log_)
      log_->line(text);
    else
      unlogged_.push_back(text);
  }
  void line(const std::string& text) {
    if (speaks_) sink_.line(text);
    log_only(text);
  }
  void warning(const std::string& text) {
    if (speaks_) sink_.warning(text);
    log_only("warning: " + text);
  }
  void status(const std::string& text) {
    if (speaks_) sink_.status(text);
  }
  bool terminal() const { return speaks_ && sink_.terminal(); }
  ProgressSink* sink() const { return speaks_ ? &sink_ : nullptr; }

 private:
  ProgressSink& sink_;
  bool speaks_;
  std::unique_ptr<records::LogFile> log_;
  std::vector<std::string> unlogged_;
};

// Of the steps of an interval; docs/files.md defines the values.
struct Throughput {
  double step_seconds = 0;            // mean
  double tokens_per_second = 0;       // of all ranks
  double rank_tokens_per_second = 0;  // of all ranks, over their number
  double rank_tflops = 0;             // model TFLOP/s, over the number of ranks
  double mfu = 0;                     // that over this rank's measured GEMM throughput; 0: not measured
};

class Run {
 public:
  Run(const config::Config& config, comm::World& world, const RunOptions& options, ProgressSink& sink)
      : config_(config),
        world_(world),
        options_(options),
        log_(sink, world.rank() == 0),
        start_(Clock::now()) {}
  Outcome run();
  void failed(const std::string&
                  reason) noexcept;  // leaves a record of how the run ended, where there is a place for it

 private:
  void name_run_directory();
  void open_data();
  void report_passes();  // how often the run goes over its data
  void open_records();
  void begin_records();
  void clear_leftovers();
  void refuse_other_runs_checkpoints();
  void log_end(const Outcome& outcome);
  void open_events(std::optional<int64_t> resumed_at);  // rank 0
  void write_events(int64_t step, std::span<const records::Scalar> scalars);
  BaseWeights begin_with_base(
      const std::string& expected);  // of adapters; expected: the hash of an earlier start
  void start_or_resume();
  void start_from_external(const std::string& name);  // hf:DIR, gguf:FILE
  void find_assets();
  void follow_schedule_of(const checkpoint::Reader& reader);
  void report_schedule(const ScheduleChoice& choice);
  void check_changes(const checkpoint::Reader& reader, const std::vector<std::string>& refused_schedule);
  void check_tokenizer(const checkpoint::Reader& reader);  // of a run that goes on
  // Warns where ids of the first weights' tokenizer stand for other text than those of the recipe's.
  void compare_tokenizer(const std::vector<std::pair<std::string, std::string>>& files,
                         const std::string& from);
  bool harmless(const RecipeChange& change, const checkpoint::Reader& reader) const;
  void measure_gemm_throughput();  // gemm_rate_, or a higher one
  void report_model();
  void trace_from(int64_t step);  // begins or ends the trace before that step
  void write_trace();
  StepResult next_step(data::Loader& loader);
  // `row`: the step of their rows in metrics.jsonl, where the run goes on from `step` after a rewind.
  void report_anomalies(int64_t step, const std::vector<Anomaly>& events, std::optional<int64_t> row = {});
  void rewind(const StepResult& result);  // or passes over the batch, where there is no checkpoint
  void after_step(const StepResult& result);
  void call_on_step(const StepResult& result);
  Throughput throughput(const IntervalSeconds& seconds) const;
  void log_step(const StepResult& result, bool as_line, bool as_row);
  void write_step_row(const StepResult& result, const Throughput& speed);
  void write_step_events(const StepResult& result);
  void estimate_time();
  void expect(double seconds);  // until the run can stop, for the answer to a signal
  void evaluate(bool last);
  void test();  // once, at the end
  void report_evaluation(const char* split, const char* name, double loss);
  void save(bool must_succeed);
  SavePlan save_plan();
  void finish_save();  // waits for the save that runs beside the training, if there is one
  void tell(const Saver::Ended& ended);
  void record(const records::MetricsRow& row);
  std::string stop_reason();  // agreed by all ranks; empty: go on
  bool is_rank0() const { return world_.rank() == 0; }
  fs::path checkpoint_root() const {
    return config_.checkpoint.save ? fs::path(config_.checkpoint.save->resolved) : run_dir_ / "checkpoints";
  }

  config::Config config_;  // train.epochs is train.train_iters once the data is open
  comm::World& world_;
  const RunOptions& options_;
  RunLog log_;
  Clock::time_point start_;

  fs::path run_dir_;
  std::string run_id_;
  std::unique_ptr<records::RunDirectory> records_;  // rank 0
  bool callback_stops_ = false;                     // RunOptions::on_step has returned false
  bool begun_ = false;                              // its texts are those of this start
  std::unique_ptr<records::FileLock> owner_lock_;   // of the run whose directory checkpoint.save lies in
  std::unique_ptr<records::FileLock> root_lock_;  // of checkpoint.save, where it is not in the run directory
  std::unique_ptr<records::MetricsWriter> metrics_;
  std::deque<records::MetricsRow> unwritten_;  // rows that found no room on the disk, oldest first
  Clock::time_point last_complaint_;
  std::unique_ptr<records::EventsWriter> events_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::array<std::shared_ptr<const data::Dataset>, 3> datasets_;
  std::string data_;  // which samples are trained on
  RunSchedule schedule_;
  std::string base_;  // hash of the weights beside which adapters train
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Saver> saver_;  // with checkpoint.async_save
  StepTimers timers_;
  int64_t total_steps_ = 0, first_step_ = 0, saved_step_ = -1;
  int64_t skips_in_a_row_ = 0;  // by the guards
  fs::path last_checkpoint_;
  std::vector<std::pair<std::string, std::string>> assets_;  // rank 0: files that came with the first weights
  std::string chat_template_;         // rank 0: the recipe's, to be kept in checkpoints
  std::vector<std::string> refused_;  // checkpoints that were not resumed from, with the reasons
  StepEstimate estimate_;
  double flops_per_step_ = 0, gemm_rate_ = 0;  // of this rank; FLOP/s
  double model_flops_ = 0;                     // of a step, of all ranks, without what recomputation adds
  int gemm_measures_ = 0;                      // again
  std::unique_ptr<Trace> trace_;
  std::optional<double> last_loss_;  // none: no step was left to do
  Clock::time_point last_line_;
  IntervalSeconds log_seconds_, events_seconds_;
  double step_seconds_ = 0, evaluation_seconds_ = 0, save_seconds_ = 0;  // of the last one; 0: unknown
};

}  // namespace capstan::train
