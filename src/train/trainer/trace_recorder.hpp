// The trace of a few steps (section `profiling`), written to the run directory.
#pragma once

#include <filesystem>
#include <memory>

#include "config/sections/config.hpp"
#include "train/trainer/profile.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::train {

class TraceRecorder {
 public:
  TraceRecorder(const config::ProfilingConfig& config, int rank, const std::filesystem::path& run_directory,
                StepRunner& runner, StepTimers& timers, RunLog& log);

  // Begins or ends the trace before that step, as the recipe asks.
  void before_step(int64_t step);
  // Writes the trace, if one is being recorded. A failure to write is a warning.
  void finish();

 private:
  const config::ProfilingConfig& config_;
  int rank_;
  std::filesystem::path directory_;
  StepRunner& runner_;
  StepTimers& timers_;
  RunLog& log_;
  std::unique_ptr<Trace> trace_;
};

}  // namespace capstan::train
