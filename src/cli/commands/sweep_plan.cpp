// capstan sweep plan | add
#include <algorithm>
#include <chrono>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/sweep_text.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "sweep/json.hpp"
#include "sweep/plan.hpp"

namespace capstan::cli {

namespace {

constexpr size_t kShownTrials = 20;

sweep::SweepOverrides overrides_of(const Context& context, std::string recipe) {
  return {std::move(recipe), context.args.overrides(), context.args.integer("trials", 1),
          context.args.integer("seed", 0)};
}

// Shows the diagnostics; throws CommandExit if there are errors.
sweep::Definition accepted(const Context& context, sweep::ParsedDefinition reading) {
  config::Resolved shown;
  shown.sources = std::move(reading.sources);
  shown.diagnostics = std::move(reading.diagnostics);
  show_diagnostics(context, shown);
  if (!shown.ok()) throw CommandExit{exit_code_of(ErrorCode::config)};
  return std::move(reading.definition);
}

sweep::ComposedPlan planned_with_progress(const Context& context, const sweep::Definition& definition) {
  Progress progress(!context.quiet(), context.color_err);
  const auto start = std::chrono::steady_clock::now();
  return sweep::make_plan(definition, [&](int64_t done, int64_t of) {
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(1) && done < of)
      progress.status("composed " + std::to_string(done) + " of " + std::to_string(of) + " trials");
  });
}

void show_plan(const Context& context, const sweep::ComposedPlan& planned, const std::string& directory) {
  const sweep::Plan& plan = planned.plan;
  int64_t tokens = 0, most_memory = 0;
  double flops = 0;
  for (const sweep::TrialPlan& trial : plan.trials) {
    tokens += trial.estimate.tokens;
    flops += trial.estimate.flops;
    most_memory = std::max(most_memory, trial.estimate.memory_bytes);
  }
  if (context.args.has("json")) {
    OrderedJson out{{"schema", "capstan.sweep_plan/1"},
                    {"name", plan.name},
                    {"directory", directory},
                    {"trials", OrderedJson::array()},
                    {"invalid", OrderedJson::array()}};
    for (const sweep::TrialPlan& trial : plan.trials)
      out["trials"].push_back({{"id", trial.id},
                               {"label", trial.label},
                               {"values", sweep::json_of(trial.values)},
                               {"seed", or_null(trial.seed)},
                               {"ranks", trial.ranks},
                               {"memory_bytes", trial.estimate.memory_bytes},
                               {"steps", or_null(trial.estimate.steps)}});
    out["invalid"] = invalid_json(plan);
    out["metric"] = sweep::json_of(plan.definition.metric);
    out["excluded"] = plan.excluded;
    out["duplicates"] = plan.duplicates;
    out["tokens"] = tokens;
    out["flops"] = flops;
    put(dump_json(out, 1) + "\n");
    return;
  }
  Table table;
  table.add({"TRIAL", "RANKS", "STEPS", "MEMORY", "OVERRIDES"});
  for (size_t i = 0; i < std::min(plan.trials.size(), kShownTrials); ++i) {
    const sweep::TrialPlan& trial = plan.trials[i];
    table.add({trial.id, std::to_string(trial.ranks), step_count_text(trial.estimate.steps),
               human_bytes(static_cast<double>(trial.estimate.memory_bytes)), trial.label});
  }
  put(table.text());
  if (plan.trials.size() > kShownTrials)
    put("and " + std::to_string(plan.trials.size() - kShownTrials) + " more\n");
  show_invalid(plan);
  for (const std::string& note : planned.notes) print_stderr("note: " + note + "\n");
  std::string line = counted(plan.trials.size(), "trial");
  if (!plan.invalid.empty()) line += ", " + std::to_string(plan.invalid.size()) + " invalid";
  if (plan.excluded) line += ", " + std::to_string(plan.excluded) + " excluded";
  if (plan.duplicates)
    line += ", " + counted(plan.duplicates, "duplicate") + " left out (the same resolved recipe)";
  put(line + "; " + human_count(static_cast<double>(tokens)) + " tokens, " + human_flop(flops) +
      ", at most " + human_bytes(static_cast<double>(most_memory)) + " on a rank\n");
  put("ranked by " + ranking_text(plan.definition.metric) + "\n");
}

// Composes the trials, has them written unless --dry-run says otherwise, and shows them. write: returns what
// was done.
template <class Write>
int finish_plan(const Context& context, const sweep::Definition& definition, const std::string& directory,
                Write write) {
  const sweep::ComposedPlan planned = planned_with_progress(context, definition);
  const bool dry = context.args.has("dry-run");
  const std::string done = dry ? "nothing was written: --dry-run" : write(planned);
  show_plan(context, planned, dry ? "" : directory);
  if (!context.quiet()) print_stderr(done + "\n");
  return 0;
}

int run_sweep_plan(Context& context) {
  const std::string& what = context.args.word(0, "FILE or RECIPE");
  sweep::Definition definition;
  if (sweep::is_sweep_file(what)) {
    definition = accepted(context, sweep::read_definition(what));
    const sweep::SweepOverrides more = overrides_of(context, definition.base);
    if (!more.overrides.empty() || more.trials || more.seed)
      definition = accepted(context, sweep::extended(definition, more, false));
  } else {
    definition = accepted(context, sweep::definition_from_overrides(overrides_of(context, what)));
  }
  const std::string directory = context.args.value("out").value_or("sweeps/" + definition.name);
  return finish_plan(context, definition, directory, [&](const sweep::ComposedPlan& planned) {
    sweep::write_plan(directory, planned);
    return "planned in " + directory + "; next: capstan sweep run " + shell_quoted(directory);
  });
}

int run_sweep_add(Context& context) {
  const std::string directory = context.args.word(0, "DIR");
  const sweep::Plan before = sweep::read_plan(directory);
  const sweep::Definition definition = accepted(
      context, sweep::extended(before.definition, overrides_of(context, before.definition.base), true));
  return finish_plan(context, definition, directory, [&](const sweep::ComposedPlan& planned) {
    const int64_t added = sweep::extend_plan(directory, planned);
    return std::to_string(added) + (added == 1 ? " trial is" : " trials are") +
           " new; existing trials keep their state";
  });
}

}  // namespace

const Command kSweepPlan = {
    .name = "sweep plan",
    .purpose = "plan a sweep: compose, check and write its trials",
    .usage = "FILE|RECIPE [a.b=c,d …] [--out DIR] [--trials N]",
    .examples = {{"sweep plan lr.yaml --out sweeps/lr", "a file of schema capstan-sweep/1"},
                 {"sweep plan quickstart optimizer.lr=1e-3,3e-3", "two values of one field"},
                 {"sweep plan quickstart 'optimizer.lr=loguniform(3e-4,1e-2)' --trials 8",
                  "eight at random"}},
    .options = {{"out", 'o', "DIR", "directory of the sweep; default sweeps/NAME"},
                {"trials", 0, "N", "number of points to draw"},
                {"seed", 0, "N", "seed of the random points; default 0"},
                {"dry-run", 0, "", "show the trials, write nothing"},
                {"json", 0, "", "print one JSON object"}},
    .details =
        "Each trial is a complete recipe, checked before anything is written; invalid ones are listed with "
        "the\nreason. The id of a trial is a hash of its resolved recipe. See `capstan help sweeps`.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_sweep_plan,
};

const Command kSweepAdd = {
    .name = "sweep add",
    .purpose = "add values, axes, seeds or points to a sweep",
    .usage = "DIR [a.b=c,d …] [--trials N]",
    .examples = {{"sweep add sweeps/lr optimizer.lr=1e-3", "one more value of an axis"},
                 {"sweep add sweeps/lr rng.seed=4,5", "more replicates"}},
    .options = {{"trials", 0, "N", "total number of points"},
                {"seed", 0, "N", "seed of the random points"},
                {"dry-run", 0, "", "show the trials, write nothing"},
                {"json", 0, "", "print one JSON object"}},
    .details = "Existing trials keep their ids, states and results.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_sweep_add,
};

}  // namespace capstan::cli
