#include "cli/stored_model.hpp"

#include "base/error.hpp"
#include "cli/launch.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::cli {

int64_t serving_ranks(const Context& context) {
  const int64_t started = context.args.integer("nproc", 1, 4096).value_or(1);
  return started > 1 ? started : comm::launched_as().size;
}

int run_stored_model(const Context& context, const std::string& name,
                     FunctionRef<int(train::LoadedModel& model, bool is_rank0)> body) {
  const comm::LaunchedAs launched = comm::launched_as();
  const int64_t ranks = serving_ranks(context);
  const bool is_rank0 = launched.rank == 0, prints = is_rank0 && !has_parent();
  const train::StoredRecipe stored = train::stored_recipe(name, context.args.overrides(), ranks);
  if (prints) {
    for (const std::string& reason : stored.refused)
      say("warning: not used: " + reason + "\nwarning: used instead: `" + stored.checkpoint.string() + "`\n");
    if (context.verbosity > 0) say("checkpoint " + stored.checkpoint.string() + "\n");
  }
  // Its warnings were shown when the run began.
  if (!stored.resolution.ok()) {
    if (is_rank0) show_diagnostics(context, stored.resolution);
    throw Exit{exit_code_of(ErrorCode::config)};
  }
  if (ranks != launched.size) return launch_ranks(context, ranks, /*saves_on_signal=*/false);
  const config::Config& config = stored.resolution.config;
  return run_in_world(context, config.resilience.timeout.seconds, [&](comm::World& world) {
    train::LoadedModel model(stored.checkpoint, config, world, context.args.value("adapter").value_or(""));
    return body(model, is_rank0);
  });
}

}  // namespace capstan::cli
