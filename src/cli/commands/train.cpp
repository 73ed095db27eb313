// capstan train
#include <signal.h>

#include <filesystem>

#include "base/error.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/launch.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "planner/cluster.hpp"
#include "planner/step_time.hpp"
#include "train/records/run_dir.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/run_recorder.hpp"
#include "train/trainer/trainer.hpp"

namespace capstan::cli {

namespace {

std::string resume_command(const Context& context, const Outcome& outcome) {
  std::vector<std::string> command = given_command(context);
  if (!context.args.has("run-dir")) command.insert(command.end(), {"--run-dir", outcome.run_dir.string()});
  if (!context.args.has("resume")) command.emplace_back("--resume");
  return command_text(command);
}

// Resolves the recipe. With --resume, a path that is no recipe is probably the run directory, so the error
// shows where that belongs.
config::Resolution resolve_for_training(const Context& context, const std::string& recipe, int64_t ranks,
                                        config::ShrunkFrom* from) {
  try {
    return resolve_recipe(context, recipe, ranks, from);
  } catch (const Error& error) {
    const std::filesystem::path path(recipe);
    std::error_code ignored;
    if (!context.args.has("resume") || context.args.has("run-dir") || !path.has_parent_path() ||
        std::filesystem::is_regular_file(path, ignored))
      throw;
    const std::string near = error.help().starts_with("did you mean") ? error.help() + " " : std::string();
    throw Error(
        error.code(), error.message(),
        near + "to resume a run, give its recipe and its run directory: capstan train RECIPE --run-dir " +
            shell_quoted(recipe) + " --resume");
  }
}

// The number of ranks that the recipe or the command line asks for, if the launch has another one: the launch
// decides. Empty: they agree.
std::string other_world_size(const config::Resolution& resolution, int64_t ranks) {
  const config::Origin* asked = nullptr;
  for (const config::HistoryEntry& entry : resolution.history)
    if (entry.path == "dist.world_size" && !entry.origin.written.empty()) asked = &entry.origin;
  if (!asked || asked->written == std::to_string(ranks)) return {};
  const bool cli = asked->kind == config::Origin::Kind::cli;
  return (cli ? "the command line asks for " : "the recipe asks for ") + asked->written +
         (asked->written == "1" ? " rank (" : " ranks (") +
         (cli ? "dist.world_size=" + asked->written : asked->text) + "), this run has " +
         std::to_string(ranks) + ": the launch decides, `--nproc` or mpirun";
}

// Starts the ranks, and records in run.json if they were killed.
int train_on_ranks(const Context& context, const config::Resolution& resolution, int64_t ranks) {
  const std::string since = records::utc_now();
  std::string death;
  const int code = launch_ranks(context, ranks, resolution.config.train.exit_signal_handler, &death);
  if (death.empty()) return code;
  try {
    train::RunOptions options;
    options.run_dir = context.args.value("run-dir").value_or("");
    options.recipe = train::recipe_record(resolution, {}, {});
    records::record_killed(train::run_directory(options), since, death);
  } catch (const Error&) {
    // The ranks have not begun a run, or its directory cannot be written.
  }
  return code;
}

train::TimeEstimate time_of_step(const config::Config& config, const planner::Cluster& cluster) {
  return {planner::step_time(planner::run_shape(config), cluster).seconds, cluster.name};
}

// The time of a step on the GPU of that name; nothing: no preset has the GPU, or the number format.
std::optional<train::TimeEstimate> time_on_gpu(const config::Config& config, const std::string& gpu) {
  const auto cluster = planner::cluster_of_gpu(gpu);
  if (!cluster) return std::nullopt;
  try {
    return time_of_step(config, *cluster);
  } catch (const Error&) {
    return std::nullopt;
  }
}

int run_train(Context& context) {
  const Arguments& args = context.args;
  const std::string& recipe = args.word(0, "RECIPE");
  // A closed pipe on standard error does not end the run.
  ::signal(SIGPIPE, SIG_IGN);

  const auto nproc = args.integer("nproc", 1, 4096);
  const comm::LaunchedAs launched = comm::launched_as();
  const bool is_rank0 = launched.rank == 0;
  if (nproc && *nproc > 1 && recipe == "-")
    fail(ErrorCode::usage, "a recipe from standard input reaches only one rank",
         "write it to a file and name that");
  const int64_t ranks = nproc ? *nproc : launched.size;
  config::ShrunkFrom shrunk_from;
  const config::Resolution resolution = resolve_for_training(context, recipe, ranks, &shrunk_from);
  if (is_rank0 && (!has_parent() || !resolution.ok())) show_diagnostics(context, resolution);
  if (!resolution.ok()) throw CommandExit{exit_code_of(ErrorCode::config)};
  train::refuse_missing_features(resolution.config);
  std::optional<train::TimeEstimate> time;
  std::optional<train::MemoryLimit> cluster_memory;
  bool is_for_gpus = false;
  if (const auto name = args.value("cluster")) {
    const planner::Cluster cluster = planner::read_cluster(*name);
    time = time_of_step(resolution.config, cluster);
    is_for_gpus = cluster.device == config::DeviceKind::cuda;
    cluster_memory = {cluster.usable_memory.value, "the cluster " + cluster.name + " allows"};
  }
  // Checks a named device before the ranks start, so that the error is reported once and not by each rank.
  const bool named_device = resolution.config.train.device != config::DeviceKind::automatic;
  if (nproc && *nproc > 1 && named_device) train::check_device(resolution.config, 0);
  if (nproc && *nproc > 1) return train_on_ranks(context, resolution, *nproc);

  Progress progress(is_rank0 && !context.quiet(), context.color_err);
  progress.line("capstan " CAPSTAN_VERSION ": training " + resolution.recipe_name + " on " +
                counted(ranks, "rank"));
  if (args.has("shrink")) progress.line(shrunk_summary(shrunk_from, resolution));
  if (const std::string other = args.has("shrink") ? "" : other_world_size(resolution, ranks); !other.empty())
    progress.line(other);

  const double timeout = resolution.config.resilience.timeout.seconds;
  return run_in_world(context, timeout, [&](comm::World& world) {
    train::RunOptions options;
    options.run_dir = args.value("run-dir").value_or("");
    if (const auto resume = args.value("resume"))
      options.resume = *resume == "auto" ? train::Resume::automatic : train::Resume::existing;
    options.force = args.has("force");
    options.cluster_memory = cluster_memory;
    options.estimate_time = [&](const std::string& gpu) {
      if (is_for_gpus && gpu.empty())
        progress.line("the estimated time of a step is for " + time->cluster + ", and this run is on no GPU");
      return time ? time : time_on_gpu(resolution.config, gpu);
    };
    options.recipe = train::recipe_record(resolution, args.overrides(), command_text(given_command(context)));
    options.changes_since = [&](const std::string& stored) {
      return train::changes_since(stored, resolution);
    };
    const Outcome outcome = train::train(resolution.config, world, options, progress);
    if (outcome.ended == Ended::finished) {
      const config::Config& config = resolution.config;
      const bool has_text = config.dataset.kind != config::DatasetKind::mock &&
                            config.tokenizer.tokenizer_type != config::TokenizerKind::none;
      if (!outcome.checkpoint.empty() && has_text && !args.has("shrink"))
        progress.line("try: capstan generate " + shell_quoted(outcome.run_dir.string()) + " --prompt TEXT");
      return 0;
    }
    progress.line("continue with: " + resume_command(context, outcome));
    return 75;
  });
}

}  // namespace

const Command kTrain = {
    .name = "train",
    .purpose = "train a model from a recipe, or continue a run",
    .usage = "RECIPE [a.b=c …] [flags]",
    .examples = {{"train quickstart", "a named recipe, into runs/quickstart"},
                 {"train my.yaml optimizer.lr=1e-3 --run-dir runs/a", "a file, one field changed"},
                 {"train my.yaml --run-dir runs/a --resume", "from its newest checkpoint"},
                 {"train llama3-70b --shrink", "two steps of a small model of the same architecture"},
                 {"train quickstart --nproc 2", "two ranks on this machine"}},
    .options =
        {{"run-dir", 0, "DIR", "run directory; default runs/NAME"},
         {"resume", 0, "", "resume the run in that directory; =auto starts a new one if there is none", "",
          "auto"},
         {"nproc", 0, "N", "start N ranks with mpirun"},
         {"force", 0, "", "start also where the estimate says that a step does not fit the memory"},
         {"cluster", 0, "CLUSTER",
          "a cluster of `plan`: a limit of memory, and a time of a step for the log, else that of the GPU"},
         {"shrink", 0, "", "scale the recipe down to a laptop: small model, mock data, two steps"}},
    .details =
        "A run directory holds the recipe as given and as resolved, metrics.jsonl, TensorBoard events and "
        "checkpoints.\n"
        "An existing one is an error without --resume, a missing one is an error with it; --resume=auto "
        "accepts both.\n"
        "A resumed run keeps the learning-rate schedule of its checkpoint: capstan help checkpoints.\n"
        "SIGINT (Ctrl-C) and SIGTERM save a checkpoint and end with code 75; a second one ends at once:\n"
        "a save under way is abandoned, and --resume goes on from the newest checkpoint before it.\n"
        "`train.exit_interval=N` stops after step N in the same way.\n"
        "The world size is that of the launch (`mpirun -n 2 capstan train …` or --nproc 2), not the "
        "recipe's.\n"
        "--shrink keeps the model family, the training method and, with enough ranks, the kinds of "
        "parallelism:\n"
        "capstan help recipes. Overrides on the command line are not scaled: train.train_iters=20.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_train,
};

}  // namespace capstan::cli
