// Options of a training run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "capstan/run.hpp"
#include "train/trainer/fit.hpp"

namespace capstan::checkpoint {
class FileSystem;
}

namespace capstan::train {

// The recipe as text, for the records of the run. Only rank 0 uses it.
struct RecipeRecord {
  // Name of the recipe. It also names the run directory if none is given.
  std::string name;
  // The file and the overrides as the user gave them.
  std::string given;
  // The complete recipe, with origins as comments. It is a valid recipe itself.
  std::string resolved;
  // Hash of the fields that alter the numbers.
  std::string hash;
  std::string command;
  // Fields that are set explicitly: on the command line, and in files or presets.
  std::vector<std::string> from_command_line, from_files;
};

// A field in which this recipe differs from the recipe of the run that is resumed.
struct RecipeChange {
  std::string path, before, after;
  bool alters_numerics = false;
};

// no: a new run, whose directory must not hold a run. existing: continue the run of the directory from its
// newest checkpoint. automatic: continue the run of the directory, or begin a new one.
enum class Resume : uint8_t { no, existing, automatic };

// Seconds of a step by formula, for figures of these GPUs.
struct TimeEstimate {
  double seconds = 0;
  std::string cluster;
};

struct RunOptions {
  // Empty: runs/NAME.
  std::filesystem::path run_dir;
  Resume resume = Resume::no;
  RecipeRecord recipe;
  // Compares the resolved recipe stored with a checkpoint with this one. An empty function compares nothing.
  std::function<std::vector<RecipeChange>(const std::string& stored_recipe)> changes_since;
  // Called on every rank after each step. False on any rank asks the run to save a checkpoint and stop after
  // this step.
  std::function<bool(const StepReport&)> on_step;
  // The memory of a rank's device on the cluster that the run is planned for; a step that needs more is
  // refused.
  std::optional<MemoryLimit> cluster_memory;
  // Trains also where the estimate says that a step does not fit the memory, with a warning.
  bool force = false;
  // The time of a step for the log, on the GPU of that name, which is empty on other devices. An empty
  // function, or nothing: the log has no estimate.
  std::function<std::optional<TimeEstimate>(const std::string& gpu)> estimate_time;
  // If false, SIGINT, SIGTERM and SIGUSR1 are left to the program, as with train.exit_signal_handler=false.
  bool handle_signals = true;
  // For tests: `files` is the file system to which checkpoints are written (null: the real one), and
  // `measure_rate` = false skips the GEMM measurement at the start.
  checkpoint::FileSystem* files = nullptr;
  bool measure_rate = true;
};

}  // namespace capstan::train
