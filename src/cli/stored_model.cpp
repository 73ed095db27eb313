#include "cli/stored_model.hpp"

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/launch.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "train/adapters/export_files.hpp"
#include "train/setup/stored_recipe.hpp"

namespace capstan::cli {

int64_t serving_ranks(const Context& context) {
  const int64_t started = context.args.integer("nproc", 1, 4096).value_or(1);
  return started > 1 ? started : comm::launched_as().size;
}

namespace {

// Prints only the warnings that the overrides cause. The other warnings were printed when the run began.
void show_override_warnings(const Context& context, const train::StoredRecipe& stored) {
  config::Resolution resolution = stored.resolution;
  std::erase_if(resolution.diagnostics, [&](const config::Diagnostic& diagnostic) {
    return !diagnostic.location.known() ||
           resolution.sources[static_cast<size_t>(diagnostic.location.source)].kind !=
               config::Source::Kind::cli;
  });
  show_diagnostics(context, resolution);
  // Sections that a model without a run does not read.
  constexpr std::array<std::string_view, 9> kUnread = {"checkpoint", "comm_overlap", "dataset",
                                                       "ddp",        "logger",       "optimizer",
                                                       "profiling",  "scheduler",    "validation"};
  // checkpoint.pretrained_checkpoint is read: it names the base model of adapters.
  std::vector<std::string> unread;
  for (const auto& [path, origin] : resolution.origins)
    if (origin.kind == config::Origin::Kind::cli && path != "checkpoint.pretrained_checkpoint" &&
        std::find(kUnread.begin(), kUnread.end(), path.substr(0, path.find('.'))) != kUnread.end())
      unread.push_back("`" + path + "`");
  std::vector<std::string> kept;
  for (const std::string& preset : stored.hidden_presets) {
    const bool is_unread = std::ranges::count(kUnread, preset.substr(0, preset.find('='))) > 0;
    (is_unread ? unread : kept).push_back("`" + preset + "`");
  }
  if (!kept.empty())
    print_stderr("warning: without effect, because the stored recipe gives the fields itself: " +
                 join(kept, ", ") + "; override a field as SECTION.FIELD=VALUE\n");
  if (!unread.empty())
    print_stderr("warning: without effect on a stored model, which neither trains nor reads a dataset: " +
                 join(unread, ", ") + "\n");
}

}  // namespace

void warn_of_turn_end(const checkpoint::Reader& reader, const config::Config& config) {
  const std::string problem = train::turn_end_problem(reader, config);
  if (!problem.empty()) print_stderr("warning: " + problem + "\n");
}

int run_stored_model(const Context& context, const std::string& name,
                     FunctionRef<int(train::LoadedModel& model, bool is_rank0)> body) {
  const comm::LaunchedAs launched = comm::launched_as();
  const int64_t ranks = serving_ranks(context);
  const bool is_rank0 = launched.rank == 0, prints = is_rank0 && !has_parent();
  const train::StoredRecipe stored = train::stored_recipe(name, context.args.overrides(), ranks);
  if (prints) {
    for (const std::string& reason : stored.refused)
      print_stderr("warning: not used: " + reason + "\nwarning: used instead: `" +
                   stored.checkpoint.string() + "`\n");
    if (context.verbosity > 0) print_stderr("checkpoint " + stored.checkpoint.string() + "\n");
  }
  if (!stored.resolution.ok()) {
    if (is_rank0) show_diagnostics(context, stored.resolution);
    throw CommandExit{exit_code_of(ErrorCode::config)};
  }
  if (prints) show_override_warnings(context, stored);
  if (ranks != launched.size) return launch_ranks(context, ranks, /*saves_on_signal=*/false);
  const config::Config& config = stored.resolution.config;
  return run_in_world(context, config.resilience.timeout.seconds, [&](comm::World& world) {
    train::LoadedModel model(stored.checkpoint, config, world, context.args.value("adapter").value_or(""));
    return body(model, is_rank0);
  });
}

}  // namespace capstan::cli
