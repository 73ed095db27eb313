#include "sweep/plan.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "checkpoint/file_system.hpp"
#include "sweep/compose.hpp"
#include "sweep/json.hpp"
#include "sweep/points.hpp"
#include "sweep/values.hpp"
#include "train/records/run_dir.hpp"

namespace capstan::sweep {

namespace fs = std::filesystem;

namespace {

constexpr size_t kIdDigits = 8;

std::string last_part(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

// The varying paths, and the labels made from them.
void describe(Plan& plan) {
  std::vector<std::string> paths;
  std::set<int64_t> seeds;
  for (const TrialPlan& trial : plan.trials) {
    for (const auto& [path, value] : trial.values)
      if (std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(path);
    if (trial.seed) seeds.insert(*trial.seed);
  }
  plan.varying.clear();
  for (const std::string& path : paths) {
    std::set<std::string> values;
    for (const TrialPlan& trial : plan.trials) values.insert(value_of(trial.values, path));
    if (values.size() > 1) plan.varying.push_back(path);
  }
  std::map<std::string, int> names;
  for (const std::string& path : plan.varying) ++names[last_part(path)];
  for (TrialPlan& trial : plan.trials) {
    std::vector<std::string> parts;
    for (const std::string& path : plan.varying)
      if (const std::string value = value_of(trial.values, path); !value.empty())
        parts.push_back((names[last_part(path)] > 1 ? path : last_part(path)) + "=" + value);
    // Nothing varies between trials, because the others are invalid or there is one.
    if (plan.varying.empty())
      for (const auto& [path, value] : trial.values) parts.push_back(last_part(path) + "=" + value);
    if (trial.seed && seeds.size() > 1) parts.push_back("seed=" + std::to_string(*trial.seed));
    trial.label = parts.empty() ? "base" : join(parts, ",");
  }
}

// JSON objects have no order: that of the definition.
void sort_values(Values& values, const Definition& definition) {
  std::vector<std::string> order;
  for (const Axis& axis : definition.axes) order.push_back(axis.path);
  if (!definition.link.empty())
    for (const auto& [path, ignored] : definition.link.front()) order.push_back(path);
  const auto rank = [&](const auto& value) { return std::find(order.begin(), order.end(), value.first); };
  std::stable_sort(values.begin(), values.end(),
                   [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
}

// Names each trial by the shortest distinct prefix of its hash, of at least eight digits.
void name_by_hash(std::vector<TrialPlan>& trials, std::string TrialPlan::*hash,
                  std::string TrialPlan::*name) {
  std::set<std::string> sorted;
  for (const TrialPlan& trial : trials) sorted.insert(trial.*hash);
  const auto common = [](const std::string& a, const std::string& b) {
    return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
  };
  for (TrialPlan& trial : trials) {
    const auto at = sorted.find(trial.*hash);
    size_t digits = kIdDigits;
    if (at != sorted.begin()) digits = std::max(digits, common(*at, *std::prev(at)) + 1);
    if (std::next(at) != sorted.end()) digits = std::max(digits, common(*at, *std::next(at)) + 1);
    trial.*name = at->substr(0, digits);
  }
}

// A seed among the values (an axis `rng.seed`) makes replicates, as those of `seeds` do.
void take_seed(Values& values, std::optional<int64_t>& seed) {
  const auto at =
      std::find_if(values.begin(), values.end(), [](const auto& value) { return value.first == kSeedPath; });
  if (at == values.end()) return;
  const auto number = parse_int(at->second);
  if (!number) return;
  seed = number;
  values.erase(at);
}

OrderedJson trial_json(const TrialPlan& trial) {
  return {{"id", trial.id},
          {"configuration", trial.configuration},
          {"hash", trial.hash},
          {"configuration_hash", trial.configuration_hash},
          {"label", trial.label},
          {"values", json_of(trial.values)},
          {"seed", or_null(trial.seed)},
          {"ranks", trial.ranks},
          {"threads", or_null(trial.threads)},
          {"estimate",
           {{"steps", or_null(trial.estimate.steps)},
            {"tokens", trial.estimate.tokens},
            {"flops", trial.estimate.flops},
            {"memory_bytes", trial.estimate.memory_bytes}}}};
}

std::string json_text(const Plan& plan) {
  const Definition& d = plan.definition;
  OrderedJson object{{"schema", kPlanSchema}, {"name", plan.name}, {"version", CAPSTAN_VERSION}};
  object["base"] = {{"recipe", d.base}, {"directory", d.directory}, {"hash", plan.base_hash}};
  object["axes"] = OrderedJson::array();
  for (const Axis& axis : d.axes) {
    OrderedJson one{{"path", axis.path}, {"kind", name_of(axis.kind)}, {"values", axis.values}};
    if (axis.kind == AxisKind::log || axis.kind == AxisKind::linear)
      one["low"] = axis.low, one["high"] = axis.high;
    object["axes"].push_back(std::move(one));
  }
  object["method"] = config::enum_name(d.method);
  object["metric"] = json_of(d.metric);
  object["varying"] = plan.varying;
  object["excluded"] = plan.excluded;
  object["duplicates"] = plan.duplicates;
  object["trials"] = OrderedJson::array();
  for (const TrialPlan& trial : plan.trials) object["trials"].push_back(trial_json(trial));
  object["invalid"] = OrderedJson::array();
  for (const InvalidTrial& one : plan.invalid)
    object["invalid"].push_back(
        {{"values", json_of(one.values)}, {"seed", or_null(one.seed)}, {"reasons", one.reasons}});
  return dump_json(object, 1) + "\n";
}

void write_text(const fs::path& path, std::string_view text) {
  FileWriter writer(path);
  writer.write(text);
  writer.finish(false);
}

void write_trial(const fs::path& directory, const ComposedPlan& planned, size_t at) {
  const TrialPlan& trial = planned.plan.trials[at];
  fs::create_directories(directory);
  write_text(directory / "recipe.yaml", "# trial " + trial.id + " of the sweep " + planned.plan.name + ": " +
                                            trial.label + "\n" + planned.files[at].recipe);
  write_text(directory / "overrides.txt", planned.files[at].overrides);
  write_text(directory / "state", "pending\n");
}

// Waits until earlier writes are on disk.
void sync_all(const fs::path& path) {
  const FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() >= 0) ::syncfs(directory.get());
}

// The lock of a plan, held while it changes.
records::FileLock lock_plan(const fs::path& directory) {
  for (int attempt = 0;; ++attempt) {
    try {
      return records::FileLock(directory, "sweep");
    } catch (const Error& error) {
      if (error.code() != ErrorCode::failed || attempt >= 50) throw;
      ::usleep(100'000);
    }
  }
}

// Whether a trial of a plan has the meaning, or the configuration, that this version gives that hash.
bool means(const TrialPlan& trial, const std::string& hash) {
  return hash.starts_with(trial.hash.empty() ? trial.id : trial.hash);
}
bool has_configuration(const TrialPlan& trial, const std::string& hash) {
  return hash.starts_with(trial.configuration_hash.empty() ? trial.configuration : trial.configuration_hash);
}

// Throws ErrorCode::config if values were added and no trial with them is valid.
void require_valid_addition(const Plan& before, const Plan& after) {
  const auto existed = [&](const TrialPlan& trial) {
    return std::ranges::any_of(before.trials, [&](const TrialPlan& one) { return means(one, trial.hash); });
  };
  if (!std::ranges::all_of(after.trials, existed)) return;
  for (const InvalidTrial& one : after.invalid)
    if (std::ranges::find(before.invalid, one) == before.invalid.end())
      fail(ErrorCode::config,
           "no added trial is valid; " + text_of(one.values, one.seed) + ":\n    " +
               join(one.reasons, "\n    "),
           "the sweep stays as it was");
}

// The first line in which two canonical forms differ: "optimizer.lr = 0.1, and now it would have 0.2".
std::string first_difference(const std::string& stored, const std::string& now) {
  const auto fields = [](const std::string& form) {
    std::map<std::string, std::string> values;
    for (const std::string_view line : split(form, '\n'))
      if (const size_t at = line.find(" = "); at != std::string_view::npos)
        values.emplace(line.substr(0, at), line.substr(at + 3));
    return values;
  };
  const auto before = fields(stored), after = fields(now);
  for (const auto& [path, value] : before) {
    const auto same = after.find(path);
    if (same == after.end() || same->second != value)
      return path + " = " + value + ", and now it would have " +
             (same == after.end() ? "none" : same->second);
  }
  for (const auto& [path, value] : after)
    if (!before.contains(path)) return "no " + path + ", and now it would have " + value;
  return "";
}

// Adopts a base whose hash differs from the one in the plan, if the recipes of the trials show that it means
// the same: a version with other fields computes another hash of the same recipe. The trials get this
// version's hashes and keep their names.
void adopt(Plan& plan, const fs::path& directory, Composer& composer) {
  if (composer.base_hash() == plan.base_hash) return;
  const auto refuse = [&](const std::string& why) {
    fail(ErrorCode::failed,
         "the recipe `" + plan.definition.base + "` has changed since this sweep was planned: " + why,
         "restore it, or plan another sweep: trials of two recipes cannot be compared");
  };
  size_t compared = 0;
  for (TrialPlan& trial : plan.trials) {
    ComposedTrial composed = composer.compose(trial.values, trial.seed);
    if (!composed.valid) refuse("trial " + trial.id + " would be invalid: " + composed.reasons.front());
    const fs::path recipe = directory / "trials" / trial.id / "recipe.yaml";
    if (fs::exists(recipe)) {
      std::string stored;
      try {
        stored = composer.stored_form(recipe);
      } catch (const Error& error) {
        refuse("this version does not read `" + recipe.string() + "`: " + error.message());
      }
      if (const std::string difference = first_difference(stored, composed.form); !difference.empty())
        refuse("trial " + trial.id + " has " + difference);
      ++compared;
    }
    trial.hash = composed.trial.hash;
    trial.configuration_hash = composed.trial.configuration_hash;
  }
  if (compared == 0) refuse("no trial has its recipe.yaml any more, so that its values cannot be compared");
  plan.base_hash = composer.base_hash();
}

// Writes the new trials, then the plan that names them.
void add_trials(const fs::path& directory, const ComposedPlan& planned, const std::vector<size_t>& added) {
  for (const size_t at : added) {
    const fs::path trial = directory / "trials" / planned.plan.trials[at].id;
    const fs::path staged = directory / "trials" / (".new." + planned.plan.trials[at].id);
    fs::remove_all(staged);
    write_trial(staged, planned, at);
    // A process that was killed before it wrote the plan may have left a directory of that name.
    if (fs::exists(trial)) fs::remove_all(trial);
    rename_new(staged, trial);
  }
  sync_all(directory);
  write_file_durably(directory / "plan.json", json_text(planned.plan));
}

}  // namespace

const TrialPlan* Plan::find(std::string_view id) const {
  const TrialPlan* found = nullptr;
  for (const TrialPlan& trial : trials) {
    if (trial.id == id) return &trial;
    if (id.empty() || !trial.id.starts_with(id)) continue;
    if (found) return nullptr;
    found = &trial;
  }
  return found;
}
void Plan::fail_no_trial(std::string_view id) const {
  std::vector<std::string> ids, beginning;
  for (const TrialPlan& trial : trials) {
    ids.push_back(trial.id);
    if (!id.empty() && trial.id.starts_with(id)) beginning.push_back(trial.id);
  }
  if (!beginning.empty())
    fail(ErrorCode::usage, "the ids of several trials begin with `" + std::string(id) + "`",
         join_some(beginning, ", ", 4));
  const std::string near = near_paths_help(near_matches(id, ids));
  fail(ErrorCode::not_found, not_found_text("trial", id),
       near.empty() ? "`capstan sweep status` lists them" : near);
}
namespace {

// Counts the trials that validate, and keeps their longest interval.
struct Validation {
  int64_t trials = 0, validating = 0, longest_interval = 0;
  void add(std::optional<int64_t> eval_interval) {
    ++trials;
    if (!eval_interval) return;
    ++validating;
    longest_interval = std::max(longest_interval, *eval_interval);
  }
};

// A sweep that names no metric is ranked by the validation loss where every trial has one, else by the
// training loss.
void choose_metric(Definition& definition, const Validation& validation, std::vector<std::string>& notes) {
  Metric& metric = definition.metric;
  const bool all = validation.validating == validation.trials;
  const std::string share = validation.validating == 0
                                ? std::string("no trial runs validation")
                                : std::to_string(validation.trials - validation.validating) + " of " +
                                      std::to_string(validation.trials) + " trials do not run validation";
  if (!metric.named) {
    metric.name = all ? "val/loss" : "loss";
    if (!all) notes.push_back(share + ": the sweep is ranked by `loss`, the training loss");
  } else if (metric.name.starts_with("val/") && !all) {
    notes.push_back(share + " (`validation.eval_interval` is null) and have no `" + metric.name + "`");
  }
  if (metric.name.starts_with("val/") && all && !definition.stop.asha.steps.empty() &&
      definition.stop.asha.steps.front() < validation.longest_interval)
    notes.push_back("the first rung of stop.asha, step " +
                    std::to_string(definition.stop.asha.steps.front()) +
                    ", comes before the first validation, so that it compares trials by their first `" +
                    metric.name + "`, of step " + std::to_string(validation.longest_interval));
}

// Adds a note for rungs at or after the last step of every trial, which stop no trial.
void note_late_rungs(const Plan& plan, std::vector<std::string>& notes) {
  int64_t longest = 0;
  for (const TrialPlan& trial : plan.trials) {
    if (!trial.estimate.steps) return;
    longest = std::max(longest, *trial.estimate.steps);
  }
  std::vector<std::string> late;
  for (const int64_t step : plan.definition.stop.asha.steps)
    if (step >= longest) late.push_back(std::to_string(step));
  if (!late.empty())
    notes.push_back("stop.asha stops no trial at step " + join_some(late, ", ", 4) +
                    ": the longest trial has " + std::to_string(longest) + " steps");
}

// If all trials are invalid for the same reason, the cause is the base recipe or `set`.
[[noreturn]] void fail_without_trials(const Plan& plan) {
  if (plan.invalid.empty())
    fail(ErrorCode::config, "`exclude` removes every point, so that no trial is left");
  const InvalidTrial& first = plan.invalid.front();
  std::string message = "every trial of this sweep is invalid";
  std::map<std::string, int64_t> reasons;
  for (const InvalidTrial& one : plan.invalid)
    for (const std::string& reason : one.reasons) ++reasons[reason];
  for (const auto& [reason, times] : reasons) {
    message += "\n    " + reason +
               (plan.invalid.size() > 1
                    ? "  (" + std::to_string(times) + " of " + std::to_string(plan.invalid.size()) + ")"
                    : "");
    if (message.size() > 4000) {
      message += "\n    and others";
      break;
    }
  }
  std::string command = "capstan check " + shell_quoted(plan.definition.base);
  for (const std::string& fixed : plan.definition.set) command += " " + shell_quoted(fixed);
  for (const auto& [path, value] : first.values) command += " " + shell_quoted(path + "=" + value);
  if (first.seed) command += " " + std::string(kSeedPath) + "=" + std::to_string(*first.seed);
  fail(ErrorCode::config, message, "check the first one: `" + command + "`");
}

}  // namespace

ComposedPlan make_plan(const Definition& definition, PlanProgress progress) {
  ComposedPlan out;
  Plan& plan = out.plan;
  plan.name = definition.name;
  plan.definition = definition;
  const Points points = points_of(definition);
  plan.excluded = points.excluded;
  if (points.exhausted)
    out.notes.push_back("there are only " + std::to_string(points.points.size()) + " different points, not " +
                        std::to_string(*definition.trials));
  if (points.grid)
    out.notes.push_back("a random " + std::to_string(points.points.size()) + " of the grid's " +
                        std::to_string(points.grid) + " points");
  std::vector<std::optional<int64_t>> seeds(definition.seeds.begin(), definition.seeds.end());
  if (seeds.empty()) seeds.emplace_back();

  Composer composer(definition);
  plan.base_hash = composer.base_hash();
  // Hashes of the trials.
  std::set<std::string> known;
  std::map<std::string, int64_t> warnings;
  Validation validation;
  // Number of trials by reason.
  std::map<std::string, int64_t> unknown_lengths;
  const auto all = static_cast<int64_t>(points.points.size() * seeds.size());
  int64_t done = 0;
  for (const Values& drawn : points.points)
    for (const auto& replicate : seeds) {
      Values point = drawn;
      std::optional<int64_t> seed = replicate;
      take_seed(point, seed);
      ComposedTrial composed = composer.compose(point, seed);
      progress(++done, all);
      if (!composed.valid) {
        plan.invalid.push_back({point, seed, std::move(composed.reasons)});
        continue;
      }
      if (!known.insert(composed.trial.hash).second) {
        ++plan.duplicates;
        continue;
      }
      validation.add(composed.eval_interval);
      if (!composed.unknown_length.empty()) ++unknown_lengths[composed.unknown_length];
      for (const std::string& warning : composed.warnings) ++warnings[warning];
      plan.trials.push_back(std::move(composed.trial));
      out.files.push_back(std::move(composed.files));
    }
  if (plan.trials.empty()) fail_without_trials(plan);
  choose_metric(plan.definition, validation, out.notes);
  note_late_rungs(plan, out.notes);
  for (const auto& [why, times] : unknown_lengths)
    out.notes.push_back("the steps of " + counted(times, "trial") +
                        " are not counted: train.epochs needs the data, which cannot be read now (" + why +
                        ")");
  for (const auto& [warning, times] : warnings)
    out.notes.push_back(warning + (times > 1 ? " (in " + std::to_string(times) + " trials)" : ""));
  name_by_hash(plan.trials, &TrialPlan::hash, &TrialPlan::id);
  name_by_hash(plan.trials, &TrialPlan::configuration_hash, &TrialPlan::configuration);
  describe(plan);
  return out;
}
ComposedPlan make_plan(const Definition& definition) {
  return make_plan(definition, [](int64_t, int64_t) {});
}

bool is_sweep(const fs::path& directory) {
  std::error_code ignored;
  return fs::is_regular_file(directory / "plan.json", ignored) &&
         fs::is_directory(directory / "trials", ignored);
}

void write_plan(const fs::path& directory, const ComposedPlan& planned) {
  std::error_code error;
  if (is_sweep(directory))
    fail(ErrorCode::failed, "`" + directory.string() + "` already holds a sweep",
         "`capstan sweep add` extends it; or choose {other_sweep_dir}");
  if (fs::exists(directory, error) && !(fs::is_directory(directory, error) && fs::is_empty(directory, error)))
    fail(ErrorCode::failed, "`" + directory.string() + "` exists and is not a sweep directory",
         "choose {other_sweep_dir}");
  const fs::path target = fs::absolute(directory).lexically_normal();
  const fs::path clean = target.has_filename() ? target : target.parent_path();
  checkpoint::real_file_system().make_directories(clean.parent_path());
  const fs::path staged =
      clean.parent_path() / ("." + clean.filename().string() + ".new." + std::to_string(::getpid()));
  try {
    fs::remove_all(staged);
    fs::create_directories(staged / "trials");
    for (size_t i = 0; i < planned.plan.trials.size(); ++i)
      write_trial(staged / "trials" / planned.plan.trials[i].id, planned, i);
    write_text(staged / "sweep.yaml", planned.plan.definition.text);
    write_text(staged / "journal.jsonl", "");
    write_text(staged / "plan.json", json_text(planned.plan));
    sync_all(staged);
    // Only an empty directory is removed.
    fs::remove(clean, error);
    rename_new(staged, clean);
  } catch (const fs::filesystem_error& problem) {
    fs::remove_all(staged, error);
    fail(ErrorCode::io, "cannot write the plan: " + std::string(problem.what()));
  } catch (...) {
    fs::remove_all(staged, error);
    throw;
  }
}

int64_t extend_plan(const fs::path& directory, const ComposedPlan& planned) {
  const auto lock = lock_plan(directory);
  Plan before = read_plan(directory);
  Composer composer(planned.plan.definition);
  adopt(before, directory, composer);
  require_valid_addition(before, planned.plan);
  ComposedPlan merged;
  merged.plan = planned.plan;
  merged.plan.trials.clear();
  // Existing results keep their meaning.
  if (!merged.plan.definition.metric.named)
    merged.plan.definition.metric.name = before.definition.metric.name;
  const auto take = [&](TrialPlan trial, TrialFiles files) {
    merged.plan.trials.push_back(std::move(trial));
    merged.files.push_back(std::move(files));
  };
  // Indices by hash.
  std::map<std::string, size_t> now;
  for (size_t i = 0; i < planned.plan.trials.size(); ++i) now[planned.plan.trials[i].hash] = i;
  // Name of each configuration in the plan, by its hash or the beginning of its hash.
  std::map<std::string, std::string> configurations;
  std::vector<size_t> added;
  for (const TrialPlan& trial : before.trials) {
    configurations.emplace(trial.configuration_hash.empty() ? trial.configuration : trial.configuration_hash,
                           trial.configuration);
    const auto same = now.lower_bound(trial.hash.empty() ? trial.id : trial.hash);
    if (same == now.end() || !means(trial, same->first)) {
      take(trial, {});
      continue;
    }
    const size_t at = same->second;
    if (!fs::is_directory(directory / "trials" / trial.id)) added.push_back(merged.plan.trials.size());
    take(planned.plan.trials[at], planned.files[at]);
    merged.plan.trials.back().id = trial.id;
    merged.plan.trials.back().configuration = trial.configuration;
    now.erase(same);
  }
  for (size_t i = 0; i < planned.plan.trials.size(); ++i) {
    TrialPlan trial = planned.plan.trials[i];
    if (!now.contains(trial.hash)) continue;
    // The configuration may exist already; the trial is then a further seed of it.
    const auto replicated = configurations.upper_bound(trial.configuration_hash);
    if (replicated != configurations.begin() &&
        trial.configuration_hash.starts_with(std::prev(replicated)->first))
      trial.configuration = std::prev(replicated)->second;
    added.push_back(merged.plan.trials.size());
    take(std::move(trial), planned.files[i]);
  }
  describe(merged.plan);
  // Writes the definition before the plan, so that no plan lacks its definition.
  const std::string old = read_file(directory / "sweep.yaml", 64 << 20);
  if (old != merged.plan.definition.text) {
    int n = 1;
    while (fs::exists(directory / ("sweep." + std::to_string(n) + ".yaml"))) ++n;
    write_file_durably(directory / ("sweep." + std::to_string(n) + ".yaml"), old);
    write_file_durably(directory / "sweep.yaml", merged.plan.definition.text);
  }
  add_trials(directory, merged, added);
  return static_cast<int64_t>(added.size());
}

TrialPlan add_trial(const fs::path& directory, const Values& values, std::optional<int64_t> seed) {
  const auto lock = lock_plan(directory);
  ComposedPlan planned;
  planned.plan = read_plan(directory);
  Values canonical;
  for (const auto& [path, value] : values) {
    const auto target = find_target(path);
    // An override's signs, `@file` and `~path`, are no paths.
    if (!target) {
      const config::Diagnostic unknown = unknown_path(path, {});
      fail(ErrorCode::config, unknown.message, unknown.helps.empty() ? "" : unknown.helps.front());
    }
    const std::string& name = target->path;
    if (std::find(kPerTrialPaths.begin(), kPerTrialPaths.end(), name) != kPerTrialPaths.end())
      fail(ErrorCode::config, "a sweep cannot set `" + name + "`",
           "leave it out: each trial has its own, in its directory");
    if (name != kSeedPath) {
      canonical.emplace_back(name, value);
      continue;
    }
    const auto number = parse_int(value);
    if (!number || (seed && *seed != *number))
      fail(ErrorCode::config, number ? "two seeds are given, " + std::to_string(*seed) + " and " + value
                                     : "`" + value + "` is not a seed");
    seed = number;
  }
  Composer composer(planned.plan.definition);
  adopt(planned.plan, directory, composer);
  ComposedTrial composed = composer.compose(canonical, seed);
  if (!composed.valid)
    fail(ErrorCode::config,
         "this trial is invalid: " + text_of(canonical, seed) + ":\n    " + join(composed.reasons, "\n    "));
  for (const TrialPlan& trial : planned.plan.trials)
    if (means(trial, composed.trial.hash)) return trial;
  TrialPlan& added = composed.trial;
  added.id = added.hash.substr(0, kIdDigits);
  added.configuration = added.configuration_hash.substr(0, kIdDigits);
  // The trial may be a replicate of a configuration that exists.
  for (const TrialPlan& trial : planned.plan.trials)
    if (has_configuration(trial, added.configuration_hash)) added.configuration = trial.configuration;
  planned.files.resize(planned.plan.trials.size());
  planned.plan.trials.push_back(std::move(added));
  planned.files.push_back(std::move(composed.files));
  describe(planned.plan);
  add_trials(directory, planned, {planned.plan.trials.size() - 1});
  return planned.plan.trials.back();
}

Plan read_plan(const fs::path& directory) {
  std::error_code unknown;
  if (!fs::exists(directory, unknown)) {
    const std::string near = near_paths_help(near_runs(directory.string(), "sweeps", is_sweep));
    fail(ErrorCode::not_found, not_found_text("sweep directory", directory.string()),
         near.empty() ? "{plan_sweep}" : near);
  }
  if (!is_sweep(directory))
    fail(ErrorCode::not_found, "`" + directory.string() + "` is not a sweep directory: it has no plan.json",
         "{plan_sweep}");
  const std::string file = (directory / "plan.json").string();
  const Json json = parse_json(read_file(file, 1 << 30), file);
  Plan plan;
  try {
    if (json.at("schema") != kPlanSchema)
      fail(ErrorCode::format, "`" + file + "` is not a sweep plan that this version reads");
    const auto values_of = [&](const Json& object) {
      Values values;
      for (const auto& [path, value] : object.items()) values.emplace_back(path, value.get<std::string>());
      sort_values(values, plan.definition);
      return values;
    };
    const auto optional = [](const Json& value) {
      return value.is_null() ? std::nullopt : std::optional<int64_t>(value.get<int64_t>());
    };
    ParsedDefinition reading = read_definition_text(
        read_file(directory / "sweep.yaml", config::TreeLimits::kFileBytes),
        json.at("base").at("directory").get<std::string>(), (directory / "sweep.yaml").string());
    reading.require_ok();
    plan.definition = std::move(reading.definition);
    plan.name = plan.definition.name = json.at("name").get<std::string>();
    plan.base_hash = json.at("base").at("hash").get<std::string>();
    // If the definition names no metric, planning has chosen one.
    if (!plan.definition.metric.named)
      plan.definition.metric.name = json.at("metric").at("name").get<std::string>();
    plan.varying = json.at("varying").get<std::vector<std::string>>();
    std::erase(plan.varying, kSeedPath);
    plan.excluded = json.at("excluded").get<int64_t>();
    plan.duplicates = json.at("duplicates").get<int64_t>();
    for (const auto& one : json.at("trials")) {
      TrialPlan trial;
      trial.id = one.at("id").get<std::string>();
      // The id becomes the name of a directory.
      if (trial.id.size() < kIdDigits || trial.id.size() > 32 ||
          trial.id.find_first_not_of("0123456789abcdef") != std::string::npos)
        fail(ErrorCode::format, "`" + file + "`: `" + trial.id + "` is not a trial");
      trial.configuration = one.at("configuration").get<std::string>();
      trial.hash = one.value("hash", "");
      trial.configuration_hash = one.value("configuration_hash", "");
      trial.label = one.at("label").get<std::string>();
      trial.values = values_of(one.at("values"));
      trial.seed = optional(one.at("seed"));
      take_seed(trial.values, trial.seed);
      trial.ranks = one.at("ranks").get<int64_t>();
      trial.threads = optional(one.at("threads"));
      const auto& estimate = one.at("estimate");
      // Earlier builds wrote 0 where train.epochs says how long a trial is.
      auto steps = optional(estimate.at("steps"));
      if (steps == 0) steps.reset();
      trial.estimate = {steps, estimate.at("tokens").get<int64_t>(), estimate.at("flops").get<double>(),
                        estimate.at("memory_bytes").get<int64_t>()};
      plan.trials.push_back(std::move(trial));
    }
    // Earlier versions call invalid trials impossible.
    for (const auto& one : json.contains("invalid") ? json.at("invalid") : json.at("impossible"))
      plan.invalid.push_back({values_of(one.at("values")), optional(one.at("seed")),
                              one.at("reasons").get<std::vector<std::string>>()});
  } catch (const Json::exception& problem) {
    fail(ErrorCode::format, "`" + file + "` is damaged: " + problem.what());
  }
  return plan;
}

}  // namespace capstan::sweep
