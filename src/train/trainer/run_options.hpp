// Options and outcome of a training run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace capstan::checkpoint {
class FileSystem;
}

namespace capstan::train {

// The recipe as text, for the records of the run. Only rank 0's is used.
struct RecipeRecord {
  // Name of the recipe, which names the run directory when none is given.
  std::string name;
  // The file and the overrides as the user gave them.
  std::string given;
  // The complete recipe, with origins as comments; a recipe by itself.
  std::string resolved;
  // Hash of the fields that alter the numbers.
  std::string hash;
  std::string command;
  // Fields that are set explicitly: on the command line, and in files or presets.
  std::vector<std::string> from_command_line, from_files;
};

// What is different between the recipe of the run that is resumed and this one.
struct RecipeChange {
  std::string path, before, after;
  bool alters_numerics = false;
};

// no: a new run, whose directory must not hold a run. existing: continue the run of the directory from its
// newest checkpoint. automatic: continue the run of the directory, or begin a new one.
enum class Resume : uint8_t { no, existing, automatic };

// One training step, as every rank knows it. Means and sums are those of the step, over all ranks.
struct StepReport {
  int64_t step = 0, total_steps = 0;  // steps done, and of the full run
  double loss = 0;                    // mean over the step's loss tokens, in nats
  double gradient_norm = 0;           // global L2 norm before clipping
  double learning_rate = 0;
  double step_seconds = 0;       // of this rank's clock
  double tokens_per_second = 0;  // of all ranks
  int64_t consumed_samples = 0;  // since the beginning of the run
  int64_t consumed_tokens = 0;   // since the beginning of the run
  int64_t memory_bytes = 0;      // peak of this rank's device memory
  bool update_skipped = false;   // because of a loss or gradient spike
};

struct RunOptions {
  std::filesystem::path run_dir;  // empty: runs/NAME
  Resume resume = Resume::no;
  RecipeRecord recipe;
  // Compares the resolved recipe stored with a checkpoint with this one. Empty function: nothing is compared.
  std::function<std::vector<RecipeChange>(const std::string& stored_recipe)> changes_since;
  // Called on every rank after each step. False on any rank asks the run to save a checkpoint and stop after
  // this step.
  std::function<bool(const StepReport&)> on_step;
  // False: SIGINT, SIGTERM and SIGUSR1 stay with the program, as with train.exit_signal_handler=false.
  bool handle_signals = true;
  // For tests: the disk that checkpoints are written to (null: the real one); false leaves out the GEMM
  // measurement at the start.
  checkpoint::FileSystem* files = nullptr;
  bool measure_rate = true;
};

enum class Ended : uint8_t {
  finished,  // all iterations done
  stopped,   // by a signal, exit_interval or exit_duration_in_mins, with a checkpoint
};

struct Outcome {
  Ended ended = Ended::finished;
  std::string reason;  // why it stopped
  int64_t step = 0;
  std::filesystem::path run_dir, checkpoint;
};

}  // namespace capstan::train
