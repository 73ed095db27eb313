// capstan trace
#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "train/trainer/step_measurement.hpp"

namespace capstan::cli {

namespace {

int run_trace(Context& context) {
  const Arguments& args = context.args;
  const config::Resolution resolution = recipe_for_measuring(context, args.word(0, "RECIPE"));
  const std::string file = args.value("output").value_or("trace.json");
  train::Trace trace(0, resolution.config.profiling.record_shapes);
  const auto world = comm::World::join();
  const train::StepMeasurement step =
      train::measure_step(train::with_short_step(resolution.config, 100), *world, 1, 0, &trace);
  trace.write(file);
  put(file + ": " + std::to_string(trace.events()) + " events of " + std::to_string(step.steps) +
      " steps of " + resolution.recipe_name + " (https://ui.perfetto.dev opens it)\n");
  return 0;
}

}  // namespace

const Command kTrace = {
    .name = "trace",
    .purpose = "record a Chrome trace of the operations of a few training steps",
    .usage = "RECIPE [a.b=c …] [flags]",
    .examples = {{"trace quickstart", "on random tokens, into trace.json"},
                 {"trace gpt2-124m train.micro_batch_size=1 -o small.json",
                  "one micro-batch of a larger model"}},
    .options = {{"output", 'o', "FILE", "file to write; default trace.json"}},
    .details =
        "Each operation has its shapes, FLOPs, bytes and the throughput reached. On a device with queues "
        "the\n"
        "times are those of events, the step does not wait for them, and each queue that transfers or "
        "copies\n"
        "has a row of its own, so that its overlap with the operations can be seen. A run traces itself "
        "with\n"
        "`profiling.trace=true` for the steps from profiling.profile_step_start to profile_step_end.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_trace,
};

}  // namespace capstan::cli
