// Reports of a training run: each step, and the outcome.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace capstan {

// One training step. Loss, gradient norm and throughput are those over all ranks. They are equal on all
// ranks, except for differences of their clocks.
struct StepReport {
  // Number of steps done, and of the full run.
  int64_t step = 0, total_steps = 0;
  // Mean loss over the step's predicted tokens, in nats.
  double loss = 0;
  // Global L2 norm of the gradients before clipping.
  double grad_norm = 0;
  double learning_rate = 0;
  // Duration of the step by the clock of this rank.
  double step_seconds = 0;
  // Throughput of all ranks together.
  double tokens_per_second = 0;
  // Samples and tokens since step 0, including those before a resume.
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  // Peak of this rank's device memory.
  int64_t memory_bytes = 0;
  // The optimizer left this step out: a loss or gradient spike, a gradient norm above
  // optimizer.grad_norm_skip_threshold, or gradients that overflow at the loss scale.
  bool update_skipped = false;
};

enum class Ended : uint8_t {
  // All steps are done.
  finished,
  // The run ended earlier, with a checkpoint, because of on_step, a signal or train.exit_*. `resume`
  // continues it.
  stopped,
};

struct Outcome {
  Ended ended = Ended::finished;
  // Why the run stopped.
  std::string reason;
  // Number of steps done, including those before a resume.
  int64_t step = 0;
  // The run directory, and the directory of the last checkpoint.
  std::filesystem::path run_dir, checkpoint;
};

}  // namespace capstan
