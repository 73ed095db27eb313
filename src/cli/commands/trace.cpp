// capstan trace
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/launch.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/step_measurement.hpp"

namespace capstan::cli {

namespace {

int run_trace(Context& context) {
  const Arguments& args = context.args;
  const std::string& recipe = args.word(0, "RECIPE");
  const int64_t nproc = args.integer("nproc", 1, 4096).value_or(1);
  const comm::LaunchedAs launched = comm::launched_as();
  const bool is_rank0 = launched.rank == 0;
  const config::Resolution resolution =
      recipe_for_measuring(context, recipe, nproc > 1 ? nproc : launched.size, is_rank0);
  train::refuse_missing_features(resolution.config);
  if (nproc > 1) return launch_ranks(context, nproc, false);
  const std::string file = args.value("output").value_or("trace.json");
  refuse_other_content(file, "{");
  return run_in_world(context, resolution.config.resilience.timeout.seconds, [&](comm::World& world) {
    // A traced step takes seconds.
    const double gflops = train::backend_of(resolution.config.train.device).gemm_gflops;
    train::Trace trace(world.rank(), resolution.config.profiling.record_shapes);
    const train::StepMeasurement step =
        train::measure_step(train::with_short_step(resolution.config, gflops), world, 1, 0, &trace);
    trace.write(file, world.communicator());
    const std::string ranks = world.size() > 1 ? " on each of " + counted(world.size(), "rank") : "";
    if (is_rank0)
      put(file + ": " + std::to_string(trace.events()) + " events of " + std::to_string(step.steps) +
          " steps of " + resolution.recipe_name + ranks + " (https://ui.perfetto.dev opens it)\n" +
          (step.bubble ? train::bubble_text(*step.bubble) + " (" +
                             counted(step.micro_batches, "micro-batch") + " a step)\n"
                       : ""));
    return 0;
  });
}

}  // namespace

const Command kTrace = {
    .name = "trace",
    .purpose = "record a Chrome trace of the operations of a few training steps",
    .usage = "RECIPE [a.b=c …] [flags]",
    .examples = {{"trace quickstart", "on random tokens, into trace.json"},
                 {"trace gpt2-124m train.micro_batch_size=1 -o small.json",
                  "one micro-batch of a larger model"},
                 {"trace quickstart ddp=zero3 train.device=checked --nproc 2",
                  "transfers of two ranks beside their operations"}},
    .options = {{"output", 'o', "FILE", "file to write; default trace.json"},
                {"nproc", 0, "N", "start N ranks with mpirun"}},
    .details =
        "Each operation has its shapes, FLOPs, bytes and the throughput reached. On a device with queues "
        "the\n"
        "times are those of events, the step does not wait for them, and each queue that transfers or "
        "copies\n"
        "has a row of its own, so that its overlap with the operations can be seen. The ranks of `--nproc` "
        "or\n"
        "mpirun are in one file, each with its rows; their clocks begin at a common barrier. Of a pipeline "
        "on the\n"
        "CPU the measured bubble is reported beside that of the schedule with equal times. A run traces\n"
        "itself with `profiling.trace=true` for the steps from profiling.profile_step_start to\n"
        "profile_step_end.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_trace,
};

}  // namespace capstan::cli
