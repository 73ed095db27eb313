// capstan sweep plan | add | run | status | retry
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/launch.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "sweep/json.hpp"
#include "sweep/runner.hpp"
#include "sweep/slurm.hpp"
#include "sweep/store.hpp"

namespace capstan::cli {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kShownTrials = 20, kShownReasons = 10, kShownInvalid = 4;  // invalid: for one reason

std::string number_text(const std::optional<double>& value) {
  std::array<char, 48> text;
  if (!value) return "-";
  std::snprintf(text.data(), text.size(), "%.5g", *value);
  return text.data();
}

// ---- plan and add
// ------------------------------------------------------------------------------------------------

sweep::CommandLine command_line_of(const Context& context, std::string recipe) {
  return {std::move(recipe), context.args.overrides(), context.args.integer("trials", 1),
          context.args.integer("seed", 0)};
}

// Shows the diagnostics; throws Exit if there are errors.
sweep::Definition accepted(const Context& context, sweep::ParsedDefinition reading) {
  config::Resolved shown;
  shown.sources = std::move(reading.sources);
  shown.diagnostics = std::move(reading.diagnostics);
  show_diagnostics(context, shown);
  if (!shown.ok()) throw Exit{exit_code_of(ErrorCode::config)};
  return std::move(reading.definition);
}

sweep::ComposedPlan planned_with_progress(const Context& context, const sweep::Definition& definition) {
  Progress progress(!context.quiet(), context.color_err);
  const auto start = Clock::now();
  return sweep::make_plan(definition, [&](int64_t done, int64_t of) {
    if (Clock::now() - start > std::chrono::seconds(1) && done < of)
      progress.status("composed " + std::to_string(done) + " of " + std::to_string(of) + " trials");
  });
}

OrderedJson invalid_json(const sweep::Plan& plan) {
  OrderedJson all = OrderedJson::array();
  for (const sweep::InvalidTrial& one : plan.invalid)
    all.push_back({{"values", sweep::text_of(one.values, one.seed)}, {"reasons", one.reasons}});
  return all;
}

// Each reason once, below the trials that have it.
void show_invalid(const sweep::Plan& plan) {
  std::vector<std::vector<const sweep::InvalidTrial*>> groups;
  for (const sweep::InvalidTrial& one : plan.invalid) {
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const auto& group) { return group[0]->reasons == one.reasons; });
    (same == groups.end() ? groups.emplace_back() : *same).push_back(&one);
  }
  for (size_t i = 0; i < std::min(groups.size(), kShownReasons); ++i) {
    const auto& group = groups[i];
    const size_t shown = group.size() > kShownInvalid + 1 ? kShownInvalid : group.size();
    for (size_t k = 0; k < shown; ++k)
      put("invalid: " + sweep::text_of(group[k]->values, group[k]->seed) + "\n");
    if (shown < group.size())
      put("invalid: " + std::to_string(group.size() - shown) + " more for the same reason\n");
    for (const std::string& reason : group[0]->reasons) put("    " + reason + "\n");
  }
  if (groups.size() > kShownReasons)
    put("and " + std::to_string(groups.size() - kShownReasons) +
        " more reasons; --json has them all, and plan.json\n");
}

std::string steps_text(std::optional<int64_t> steps) {
  return steps ? std::to_string(*steps) : "?";
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
    table.add({trial.id, std::to_string(trial.ranks), steps_text(trial.estimate.steps),
               human_bytes(static_cast<double>(trial.estimate.memory_bytes)), trial.label});
  }
  put(table.text());
  if (plan.trials.size() > kShownTrials)
    put("and " + std::to_string(plan.trials.size() - kShownTrials) + " more\n");
  show_invalid(plan);
  for (const std::string& note : planned.notes) print_stderr("note: " + note + "\n");
  std::string line = std::to_string(plan.trials.size()) + (plan.trials.size() == 1 ? " trial" : " trials");
  if (!plan.invalid.empty()) line += ", " + std::to_string(plan.invalid.size()) + " invalid";
  if (plan.excluded) line += ", " + std::to_string(plan.excluded) + " excluded";
  if (plan.duplicates)
    line += ", " + std::to_string(plan.duplicates) + (plan.duplicates == 1 ? " duplicate" : " duplicates") +
            " left out (the same meaning)";
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
    const sweep::CommandLine more = command_line_of(context, definition.base);
    if (!more.words.empty() || more.trials || more.seed)
      definition = accepted(context, sweep::extended(definition, more, false));
  } else {
    definition = accepted(context, sweep::definition_from_words(command_line_of(context, what)));
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
      context, sweep::extended(before.definition, command_line_of(context, before.definition.base), true));
  return finish_plan(context, definition, directory, [&](const sweep::ComposedPlan& planned) {
    const int64_t added = sweep::extend_plan(directory, planned);
    return std::to_string(added) + (added == 1 ? " trial is" : " trials are") +
           " new; existing trials keep their state";
  });
}

// ---- run
// ---------------------------------------------------------------------------------------------------------

std::string last_line(const std::string& text) {
  const size_t at = text.rfind('\n');
  return at == std::string::npos ? text : text.substr(at + 1);
}

// A line for each slot on a terminal, plain lines elsewhere.
class RunDisplay : public sweep::RunnerListener {
 public:
  RunDisplay(const Context& context, const sweep::Store& store, int64_t slots)
      : quiet_(context.quiet()),
        terminal_(!context.quiet() && is_terminal(STDERR_FILENO)),
        store_(store),
        lines_(static_cast<size_t>(slots)) {}
  ~RunDisplay() override { clear(); }

  void started(const sweep::TrialPlan& trial, int64_t attempt, int slot) override {
    const std::string text =
        trial.id + " " + trial.label + (attempt > 1 ? " (attempt " + std::to_string(attempt) + ")" : "");
    if (!terminal_) line("started " + text);
    line_of(slot) = text + " | starting";
    draw();
  }
  void ended(const sweep::TrialPlan& trial, const sweep::StateChange& how, int slot) override {
    const sweep::TrialStatus status = store_.status(trial);
    std::string text = std::string(name_of(how.state)) + " " + trial.id + " " + trial.label;
    if (status.metric)
      text += " | " + store_.plan().definition.metric.name + " " + number_text(status.metric);
    if (!how.reason.empty()) text += " | " + how.reason;
    line_of(slot).clear();
    line(text);
  }
  void failure(const sweep::TrialPlan& trial, const sweep::StateChange& how,
               const std::string& log_tail) override {
    // The others are in `sweep status`.
    if (how.state == sweep::State::failed && shown_++ > 0) return;
    clear();
    std::string text = "trial " + trial.id + " (" + trial.label + ") failed: " + how.reason +
                       "; the end of " + store_.attempt(trial.id, how.attempt).string() + "/log.txt:\n";
    for (const std::string_view one : split(log_tail, '\n')) text += "    " + std::string(one) + "\n";
    print_stderr(text);
    draw();
  }
  void progress(int slot, const sweep::TrialPlan& trial, std::optional<int64_t> step,
                std::optional<int64_t> steps, std::optional<double> metric) override {
    std::string text = trial.id + " " + trial.label + " | step " + (step ? std::to_string(*step) : "-") +
                       "/" + steps_text(steps);
    if (metric) text += " | " + store_.plan().definition.metric.name + " " + number_text(metric);
    line_of(slot) = text;
    if (!terminal_ && Clock::now() - last_line_[slot] > std::chrono::seconds(30)) {
      last_line_[slot] = Clock::now();
      line(text);
    }
    draw();
  }
  void note(const std::string& text) override { line(text); }

 private:
  std::string& line_of(int slot) { return lines_[static_cast<size_t>(slot)]; }
  void line(const std::string& text) {
    if (quiet_) return;
    clear();
    print_stderr(text + "\n");
    draw();
  }
  void clear() {
    if (drawn_ > 0) print_stderr("\r\x1b[" + std::to_string(drawn_) + "A\x1b[J");
    drawn_ = 0;
  }
  void draw() {
    if (!terminal_) return;
    clear();
    std::string text;
    const auto columns = static_cast<size_t>(std::max(20, terminal_columns() - 1));
    for (size_t slot = 0; slot < lines_.size(); ++slot) {
      const std::string one =
          "[" + std::to_string(slot + 1) + "] " + (lines_[slot].empty() ? "-" : lines_[slot]);
      text += one.substr(0, columns) + "\n";
    }
    drawn_ = static_cast<int>(lines_.size());
    print_stderr(text);
  }

  bool quiet_, terminal_;
  const sweep::Store& store_;
  std::vector<std::string> lines_;
  std::map<int, Clock::time_point> last_line_;
  int drawn_ = 0, shown_ = 0;
};

std::vector<std::string> ids_of(const sweep::Plan& plan, const std::vector<std::string>& words) {
  std::vector<std::string> ids;
  for (const std::string& word : words) {
    const sweep::TrialPlan* trial = plan.find(word);
    if (!trial && word.size() >= 8) {  // a configuration: all its seeds
      const size_t before = ids.size();
      for (const sweep::TrialPlan& one : plan.trials)
        if (one.configuration == word) ids.push_back(one.id);
      if (ids.size() > before) continue;
    }
    if (!trial) plan.fail_no_trial(word);
    ids.push_back(trial->id);
  }
  return ids;
}

int run_sweep_run(Context& context) {
  const Arguments& args = context.args;
  sweep::Store store(args.word(0, "DIR"));
  sweep::RunnerOptions options;
  options.program = own_path();
  options.slots = args.integer("slots", 1, 4096).value_or(1);
  if (args.value("on-failure") == "stop") options.on_failure = sweep::OnFailure::stop;
  if (args.value("launcher") == "srun") options.launcher = sweep::Launcher::srun;
  if (const auto trial = args.value("trial")) options.trials = ids_of(store.plan(), {*trial});
  if (!context.quiet())
    print_stderr("capstan " CAPSTAN_VERSION ": sweep " + store.plan().name + ", " +
                 std::to_string(store.plan().trials.size()) + " trials, " + std::to_string(options.slots) +
                 (options.slots == 1 ? " slot\n" : " slots\n"));
  sweep::RunnerResult result;
  {
    RunDisplay display(context, store, options.slots);
    result = sweep::run_trials(store, options, display);
  }
  if (!context.quiet()) {
    std::string text = std::to_string(result.done) + " done";
    const auto add = [&](int64_t count, const char* what) {
      if (count) text += ", " + std::to_string(count) + " " + what;
    };
    add(result.pruned, "pruned");
    add(result.failed, "failed");
    add(result.pending, "pending");
    add(result.elsewhere, "running elsewhere");
    const std::string directory = shell_quoted(args.words()[0]);
    if (result.pending)
      text += "; continue with: capstan sweep run " + directory;
    else if (result.failed)
      text += "; see capstan sweep status " + directory + ", and capstan sweep retry " + directory;
    else
      text += "; see capstan sweep table " + directory;
    print_stderr(text + "\n");
  }
  return result.exit_code();
}

// ---- status and retry
// --------------------------------------------------------------------------------------------

int run_sweep_status(Context& context) {
  const sweep::Store store(context.args.word(0, "DIR"));
  const auto statuses = store.statuses();
  std::map<std::string, int64_t> counts;
  for (const sweep::TrialStatus& status : statuses) ++counts[std::string(name_of(status.state))];
  const auto& trials = store.plan().trials;
  const auto tasks = sweep::slurm_tasks(store.directory());
  if (context.args.has("json")) {
    OrderedJson out{{"schema", "capstan.sweep_status/1"},
                    {"name", store.plan().name},
                    {"metric", sweep::json_of(store.plan().definition.metric)},
                    {"counts", counts},
                    {"trials", OrderedJson::array()}};
    for (size_t i = 0; i < trials.size(); ++i) {
      const sweep::TrialStatus& s = statuses[i];
      OrderedJson one{{"id", trials[i].id},
                      {"label", trials[i].label},
                      {"values", sweep::json_of(trials[i].values)},
                      {"state", name_of(s.state)},
                      {"attempt", s.attempt},
                      {"steps", or_null(s.total_steps)},
                      {"seed", or_null(trials[i].seed)},
                      {"step", or_null(s.step)},
                      {"metric", or_null(s.metric)},
                      {"seconds", s.seconds}};
      if (!s.reason.empty()) one["reason"] = s.reason;
      if (!s.owner.empty()) one["owner"] = s.owner;
      if (const auto task = tasks.find(trials[i].id); task != tasks.end())
        one["slurm"] = {
            {"job", task->second.job}, {"state", task->second.state}, {"reason", task->second.reason}};
      out["trials"].push_back(std::move(one));
    }
    out["invalid"] = invalid_json(store.plan());
    put(dump_json(out, 1) + "\n");
    return 0;
  }
  Table table;
  table.add({"TRIAL", "STATE", "STEP", store.plan().definition.metric.name, "OVERRIDES", ""});
  for (size_t i = 0; i < trials.size(); ++i) {
    const sweep::TrialStatus& s = statuses[i];
    std::string about = s.owner.empty() ? last_line(s.reason) : s.owner;
    if (const auto task = tasks.find(trials[i].id); task != tasks.end() && task->second.in_queue) {
      about += (about.empty() ? "Slurm " : "; Slurm ") + task->second.job + " " + task->second.state;
      if (task->second.reason != "None") about += " (" + task->second.reason + ")";
    }
    table.add({trials[i].id, std::string(name_of(s.state)),
               (s.step ? std::to_string(*s.step) : "-") + "/" + steps_text(s.total_steps),
               number_text(s.metric), trials[i].label, about});
  }
  put(table.text());
  std::string line;
  for (const auto& [state, count] : counts)
    line += (line.empty() ? "" : ", ") + std::to_string(count) + " " + state;
  if (!store.plan().invalid.empty()) line += ", " + std::to_string(store.plan().invalid.size()) + " invalid";
  put(line + "\n");
  show_invalid(store.plan());
  put("ranked by " + ranking_text(store.plan().definition.metric) + "\n");
  return 0;
}

int run_sweep_retry(Context& context) {
  const sweep::Store store(context.args.word(0, "DIR"));
  const std::vector<std::string> named(context.args.words().begin() + 1, context.args.words().end());
  std::vector<std::string> ids = ids_of(store.plan(), named);
  if (named.empty())
    for (const sweep::TrialPlan& trial : store.plan().trials)
      if (store.state(trial.id) == sweep::State::failed &&
          std::filesystem::is_directory(store.trial(trial.id)))
        ids.push_back(trial.id);
  int64_t changed = 0;
  for (const std::string& id : ids) {
    if (!std::filesystem::is_directory(store.trial(id)))
      fail(ErrorCode::not_found, "trial " + id + ": " + store.damage(id));
    const auto lock = sweep::TrialLock::try_take(store.trial(id));
    if (!lock)
      fail(ErrorCode::failed, "trial " + id + " is running: " +
                                  sweep::holder_of(store.trial(id)).value_or(sweep::LockHolder{}).text);
    const sweep::State state = store.state(id);
    if (state == sweep::State::done)
      fail(ErrorCode::usage, "trial " + id + " is done", "a completed trial is not run again");
    if (state == sweep::State::pending) continue;
    store.change(id, {sweep::State::pending, 0, "retry requested", {}});
    ++changed;
  }
  put(std::to_string(changed) + (changed == 1 ? " trial is" : " trials are") + " pending again\n");
  return 0;
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
                {"json", 0, "", "as one JSON object"}},
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
                {"json", 0, "", "as one JSON object"}},
    .details = "Existing trials keep their ids, states and results.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_sweep_add,
};

const Command kSweepRun = {
    .name = "sweep run",
    .purpose = "run the unfinished trials of a sweep",
    .usage = "DIR [--slots N] [--on-failure continue|stop]",
    .examples = {{"sweep run sweeps/lr", "one after the other"},
                 {"sweep run sweeps/lr --slots 2", "two at a time"}},
    .options = {{"slots", 0, "N", "number of trials that run at the same time; default 1"},
                {"on-failure", 0, "WHAT", "after a failed trial: continue (default) or stop", "",
                 "continue stop"},
                {"trial", 0, "ID", "run this trial only"},
                {"launcher", 0, "NAME", "launcher of trials with several ranks: mpirun (default) or srun", "",
                 "mpirun srun"}},
    .details =
        "Each trial is a process of its own and resumes from its checkpoint. Several runners can share one "
        "directory;\n"
        "a trial runs in one of them. Ctrl-C once: trials save and end (code 75); twice: they are killed. "
        "Code 1\n"
        "if a trial has failed.\n",
    .max_words = 1,
    .run = run_sweep_run,
};

const Command kSweepStatus = {
    .name = "sweep status",
    .purpose = "the state of each trial",
    .usage = "DIR [--json]",
    .examples = {{"sweep status sweeps/lr", "with the Slurm state of submitted trials"}},
    .options = {{"json", 0, "", "as one JSON object"}},
    .max_words = 1,
    .run = run_sweep_status,
};

const Command kSweepRetry = {
    .name = "sweep retry",
    .purpose = "mark failed trials as pending, so that they run again",
    .usage = "DIR [TRIAL …]",
    .examples = {{"sweep retry sweeps/lr", "all failed trials"},
                 {"sweep retry sweeps/lr 3f9c1a7e", "one trial, failed or pruned"}},
    .max_words = SIZE_MAX,
    .run = run_sweep_retry,
};

}  // namespace capstan::cli
