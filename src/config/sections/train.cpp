#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<TrainConfig>& s) {
  using T = TrainConfig;
  s.doc("batch sizes, length, stop rules and device");
  s.field("micro_batch_size", &T::micro_batch_size)
      .doc("samples of one forward pass of one model replica")
      .unit("samples")
      .range(1, 1 << 30)
      .effect(Effect::memory)
      .alias("mbs")
      .known_as("batch_size")
      .known_as("per_device_train_batch_size");
  s.field("global_batch_size", &T::global_batch_size)
      .doc("samples of one step over all ranks")
      .unit("samples")
      .count()
      .range(1, 1 << 30)
      .alias("gbs");
  s.field("num_microbatches", &T::num_microbatches)
      .doc("forward passes that one step accumulates")
      .unit("micro-batches")
      .range(1, 1 << 30)
      .effect(Effect::perf)
      .known_as("gradient_accumulation_steps");
  s.field("train_iters", &T::train_iters)
      .doc("steps of the run")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .known_as("max_steps")
      .known_as("steps");
  s.field("train_samples", &T::train_samples)
      .doc("length of the run in samples, instead of train_iters")
      .unit("samples")
      .count()
      .range(1, int64_t{1} << 60);
  s.field("epochs", &T::epochs)
      .doc(
          "length of the run in passes over the training data, instead of train_iters; rounded up to whole "
          "steps "
          "when the data is opened")
      .unit("passes")
      .above(0)
      .known_as("num_epochs")
      .known_as("num_train_epochs")
      .known_as("max_epochs");
  s.field("exit_interval", &T::exit_interval)
      .doc("save and stop after each multiple of so many steps (exit code 75)")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .effect(Effect::io);
  s.field("exit_duration_in_mins", &T::exit_duration_in_mins)
      .doc("save and stop after this time (exit code 75)")
      .unit("minutes")
      .above(0)
      .effect(Effect::io);
  s.field("exit_signal_handler", &T::exit_signal_handler)
      .doc("on SIGINT and SIGTERM save and stop (exit code 75); false: they end the process at once")
      .effect(Effect::io);
  s.field("device", &T::device).doc("what the model runs on").effect(Effect::perf);
  s.field("threads", &T::threads)
      .doc("CPU threads of one rank; null: cores / ranks of this machine; same numbers for any")
      .unit("threads")
      .range(1, 1024)
      .effect(Effect::perf);
}

}  // namespace capstan::config
