#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<TrainConfig>& s) {
  using T = TrainConfig;
  s.doc("batch sizes, length of the run, stopping conditions and device");
  s.field("micro_batch_size", &T::micro_batch_size)
      .doc(
          "samples per forward and backward pass of one model replica; usually the largest that fits in "
          "memory")
      .unit("samples")
      .range(1, 1 << 30)
      .effect(Effect::memory)
      .alias("mbs")
      .known_as("batch_size")
      .known_as("per_device_train_batch_size");
  s.field("global_batch_size", &T::global_batch_size)
      .doc("samples per training step, summed over all data-parallel ranks and micro-batches")
      .unit("samples")
      .count()
      .range(1, 1 << 30)
      .alias("gbs");
  s.field("rampup_batch_size", &T::rampup_batch_size)
      .doc(
          "[start, increment, samples]: global batch size that grows from start to global_batch_size in "
          "equal steps over these samples")
      .unit("samples");
  s.field("decrease_batch_size_if_needed", &T::decrease_batch_size_if_needed)
      .doc(
          "round a batch down to a multiple of micro_batch_size * data-parallel size; false: one that does "
          "not divide is an error");
  s.field("num_microbatches", &T::num_microbatches)
      .doc("gradient accumulation steps: forward and backward passes of one replica per training step")
      .unit("micro-batches")
      .range(1, 1 << 30)
      .effect(Effect::perf)
      .known_as("gradient_accumulation_steps");
  s.field("train_iters", &T::train_iters)
      .doc("number of training steps (optimizer updates)")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .known_as("max_steps")
      .known_as("steps");
  s.field("train_samples", &T::train_samples)
      .doc("length of the run in training samples, instead of train_iters")
      .unit("samples")
      .count()
      .range(1, int64_t{1} << 60);
  s.field("epochs", &T::epochs)
      .doc(
          "length of the run in passes over the training data, instead of train_iters; rounded up to full "
          "steps; typical for fine-tuning: 1 to 3")
      .unit("passes")
      .above(0)
      .known_as("num_epochs")
      .known_as("num_train_epochs")
      .known_as("max_epochs");
  s.field("exit_interval", &T::exit_interval)
      .doc("save a checkpoint and exit with code 75 at every step that is a multiple of this")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .effect(Effect::io);
  s.field("exit_duration_in_mins", &T::exit_duration_in_mins)
      .doc("save a checkpoint and exit with code 75 after this time, for jobs with a time limit")
      .unit("minutes")
      .above(0)
      .effect(Effect::io);
  s.field("exit_signal_handler", &T::exit_signal_handler)
      .doc(
          "on SIGINT and SIGTERM save a checkpoint and exit with code 75; false: these signals terminate the "
          "process immediately")
      .effect(Effect::io);
  s.field("device", &T::device)
      .doc("device that runs the model")
      .unsupported("training on a device that has shapes and no memory",
                   [](const Value& v) { return v.text == "meta"; })
      .effect(Effect::perf);
  s.field("threads", &T::threads)
      .doc("CPU threads per rank; null: cores of this machine / ranks on it; results do not depend on it")
      .unit("threads")
      .range(1, 1024)
      .effect(Effect::perf);
}

}  // namespace capstan::config
