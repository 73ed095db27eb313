// capstan sweep run
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/launch.hpp"
#include "cli/sweep_text.hpp"
#include "cli/terminal.hpp"
#include "sweep/runner.hpp"
#include "sweep/store.hpp"

namespace capstan::cli {

namespace {

using Clock = std::chrono::steady_clock;

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
      text += " | " + store_.plan().definition.metric.name + " " + metric_text(status.metric);
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
                       "/" + step_count_text(steps);
    if (metric) text += " | " + store_.plan().definition.metric.name + " " + metric_text(metric);
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

int run_sweep_run(Context& context) {
  const Arguments& args = context.args;
  sweep::Store store(args.word(0, "DIR"));
  sweep::RunnerOptions options;
  options.program = own_path();
  options.slots = args.integer("slots", 1, 4096).value_or(1);
  if (args.value("on-failure") == "stop") options.on_failure = sweep::OnFailure::stop;
  if (args.value("launcher") == "srun") options.launcher = sweep::Launcher::srun;
  if (const auto trial = args.value("trial")) options.trials = trial_ids(store.plan(), {*trial});
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

}  // namespace

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

}  // namespace capstan::cli
