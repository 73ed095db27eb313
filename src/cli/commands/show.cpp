// capstan show

#include "config/tools/show.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/grid_text.hpp"
#include "cli/recipe_input.hpp"
#include "cli/step_text.hpp"
#include "cli/terminal.hpp"
#include "parallel/schedule.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/schedule_setup.hpp"
#include "train/trainer/start_checks.hpp"

namespace capstan::cli {

namespace {

std::string schedule_name(const parallel::PipelineShape& shape) {
  switch (shape.order) {
    case config::PipelineSchedule::gpipe:
      return "GPipe";
    case config::PipelineSchedule::zb_h1:
      return "ZB-H1";
    case config::PipelineSchedule::zb_v:
      return "ZB-V";
    case config::PipelineSchedule::one_f_one_b:
    case config::PipelineSchedule::interleaved:
    case config::PipelineSchedule::pipedream:
      break;
  }
  return shape.chunks > 1 ? "interleaved 1F1B" : "1F1B";
}

// The pipeline schedule of a step: idle time, micro-batches in flight, and a diagram as wide as the terminal.
std::string pipeline_text(const config::Config& config) {
  const parallel::PipelineShape shape =
      train::pipeline_shape(config, config.train.num_microbatches.value_or(1));
  const parallel::Schedule schedule = parallel::make_schedule(shape);
  const parallel::ScheduleRun run = parallel::simulate(shape, schedule);
  const bool separate = shape.separates_weight_gradients();
  std::string text =
      schedule_name(shape) + ": " + counted(shape.ranks, "pipeline rank") + ", " +
      counted(shape.chunks, "chunk") + " on each, " + counted(shape.micro_batches, "micro-batch") + "\n" +
      std::to_string(run.ticks) + " ticks; " +
      (separate ? "a forward pass, the input gradients and the weight gradients take 1 each"
                : "a forward pass takes 1, a backward pass 2") +
      "; each rank is idle for " + std::to_string(run.idle[0]) + " (bubble " + fixed(100 * run.bubble(), 1) +
      "% of the work)\nlargest number of " +
      (shape.chunks > 1 ? "(micro-batch, chunk) pairs" : "micro-batches") + " in flight, from rank 0:";
  for (const int64_t live : run.live) text += " " + std::to_string(live);
  if (separate) {
    text += "\nwith those that wait for their weight gradients, from rank 0:";
    for (const int64_t held : run.held) text += " " + std::to_string(held);
    text += "\nticks that each rank is idle between its first and its last action, from rank 0:";
    for (const int64_t idle : run.idle_between) text += " " + std::to_string(idle);
  }
  text += "\ndiagram, a column for each tick: 0 is the forward pass of micro-batch 0, [0] its " +
          std::string(separate ? "input gradients, w0 its weight gradients" : "backward pass") +
          std::string(shape.chunks > 1 ? ", with a letter for the chunk" : "") + "; . is idle\n";
  return text + parallel::draw(shape, schedule, run, std::max<int64_t>(40, terminal_columns() - 10));
}

// --grid, --schedule and --step, as many as were asked for, in this order.
void show_layout(const Arguments& args, const config::Config& config, std::optional<int64_t> rank) {
  const train::ResidentData data = args.has("step") ? train::resident_data(config) : train::ResidentData();
  std::string text;
  const auto add = [&](const char* flag, const auto& part) {
    if (args.has(flag)) text += (text.empty() ? "" : "\n") + part();
  };
  add("grid", [&] { return grid_text(train::mesh_sizes(config, config.dist.world_size), rank); });
  add("schedule", [&] { return pipeline_text(config); });
  add("step", [&] { return step_text(config, rank, data); });
  put(text);
  if (args.has("step")) train::check_memory_limit(config, data.bytes);
}

int run_show(Context& context) {
  const Arguments& args = context.args;
  const std::string& recipe = args.word(0, "RECIPE");
  const std::string format = args.value("format").value_or("yaml");
  const bool layout = args.has("schedule") || args.has("grid") || args.has("step");
  if (args.count("origin") + args.count("minimal") + args.count("format") + args.count("json") +
          static_cast<size_t>(layout) >
      1)
    fail(ErrorCode::usage,
         layout ? "--grid, --schedule and --step exclude --origin, --minimal, --format and --json"
                : "--origin, --minimal, --format and --json exclude each other");
  if (layout && args.words().size() > 1) fail(ErrorCode::usage, "--grid, --schedule and --step take no PATH");
  const auto rank = args.integer("rank", 0);
  if (rank && !args.has("grid") && !args.has("step"))
    fail(ErrorCode::usage, "--rank R chooses the rank that --grid and --step show", "add --grid or --step");

  config::ShrunkFrom shrunk_from;
  const config::Resolution resolution =
      require_recipe(context, recipe, ranks_argument(context), &shrunk_from);
  if (args.has("shrink") && !context.quiet() && !args.has("json"))
    print_stderr("--shrink changes:\n" + shrunk_changes(shrunk_from, resolution));
  if (layout) {
    show_layout(args, resolution.config, rank);
    return 0;
  }
  config::ShowOptions options;
  if (args.words().size() > 1) options.path = args.words()[1];
  if (args.has("origin")) options.format = config::ShowFormat::origin;
  if (args.has("minimal")) options.format = config::ShowFormat::minimal;
  if (format == "json") options.format = config::ShowFormat::json;
  if (!args.has("json")) {
    put(config::show(resolution, options));
    return 0;
  }

  options.format = config::ShowFormat::json;
  OrderedJson object = {{"schema", "capstan.show/1"}, {"recipe", resolution.recipe_name}};
  if (!options.path.empty()) object["path"] = options.path;
  object[options.path.empty() ? "config" : "value"] = ordered_json_of(config::show(resolution, options));
  object["presets"] = resolution.presets;
  if (options.path.empty()) {
    OrderedJson origins = OrderedJson::object();
    for (const auto& [path, origin] : resolution.origins) origins[path] = origin.text;
    object["origins"] = std::move(origins);
  }
  put(dump_json(object, 2) + "\n");
  return 0;
}

}  // namespace

const Command kShow = {
    .name = "show",
    .purpose = "print the resolved recipe, or one value of it",
    .usage = "RECIPE [PATH] [a.b=c …] [flags]",
    .examples = {{"show llama3-8b", "all fields, as a YAML recipe"},
                 {"show llama3-8b model.num_layers", "one value"},
                 {"show my.yaml --origin", "each field, and where its value comes from"},
                 {"show llama3-70b --schedule", "its pipeline schedule"},
                 {"show llama3-70b --ranks 1024 --grid", "its process groups"},
                 {"show llama3-70b --ranks 1024 --grid --rank 777", "coordinates and groups of one rank"},
                 {"show gpt2-124m dist.tp=2 dist.pp=2 --ranks 8 --step",
                  "memory and communication, by stage"},
                 {"show gpt2-124m dist.pp=2 --ranks 4 --grid --schedule --step", "all three"},
                 {"show llama3-70b --shrink", "scaled down to a laptop, with the changes"},
                 {"show my.yaml --minimal", "only what differs from presets and defaults"}},
    .options =
        {{"origin", 0, "",
          "print each field with the origin of its value: file:line:col, preset, <cli>:n, derived: formula"},
         {"minimal", 0, "", "print the shortest recipe that resolves to the same values"},
         {"format", 0, "FORM", "output format: yaml (default) or json (plain nested values)", "",
          "yaml json"},
         {"schedule", 0, "", "print the pipeline schedule: bubble, micro-batches in flight, and a diagram"},
         {"step", 0, "",
          "print memory by category and bytes sent by group of a training step, for each pipeline stage"},
         {"grid", 0, "", "print the dense and expert rank grids, and their process groups"},
         {"rank", 0, "R", "with --grid and --step: show this rank only"},
         {"ranks", 0, "N", "the world size, instead of the recipe's"},
         {"shrink", 0, "", "scale the recipe down as `train --shrink` does, and list the changes"},
         {"json", 0, "", "print values, presets and origins as one JSON object"}},
    .details = "PATH is a section, a field or an item of one; aliases are accepted.\n",
    .overrides = true,
    .max_words = 2,
    .run = run_show,
};

}  // namespace capstan::cli
