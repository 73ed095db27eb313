// capstan sweep status | retry
#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "cli/commands/commands.hpp"
#include "cli/sweep_text.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "sweep/json.hpp"
#include "sweep/slurm.hpp"
#include "sweep/store.hpp"

namespace capstan::cli {

namespace {

std::string last_line(const std::string& text) {
  const size_t at = text.rfind('\n');
  return at == std::string::npos ? text : text.substr(at + 1);
}

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
               (s.step ? std::to_string(*s.step) : "-") + "/" + step_count_text(s.total_steps),
               metric_text(s.metric), trials[i].label, about});
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
  std::vector<std::string> ids = trial_ids(store.plan(), named);
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

const Command kSweepStatus = {
    .name = "sweep status",
    .purpose = "print the state of each trial",
    .usage = "DIR [--json]",
    .examples = {{"sweep status sweeps/lr", "with the Slurm state of submitted trials"}},
    .options = {{"json", 0, "", "print one JSON object"}},
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
