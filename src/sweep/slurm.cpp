#include "sweep/slurm.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "sweep/process.hpp"
#include "train/records/run_dir.hpp"

namespace capstan::sweep {

namespace {

namespace fs = std::filesystem;

// MaxArraySize is 1001 by default, and task 0 is not used.
constexpr int64_t kArrayMax = 1000;
// Seconds for an answer of Slurm.
constexpr double kSlurmTimeout = 20;

std::string file_of(int64_t number, const char* suffix) {
  return "array-" + std::to_string(number) + suffix;
}

// A path within double quotes of an #SBATCH line, where % begins a pattern.
std::string in_header(const std::string& path) {
  std::string text;
  for (const char c : path) {
    if (c == '%') text += '%';
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text;
}

std::string job_name(std::string name, int64_t number) {
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '-' && c != '_') c = '_';
  return name + "-" + std::to_string(number);
}

std::map<int64_t, std::vector<std::string>> written_maps(const fs::path& directory) {
  std::map<int64_t, std::vector<std::string>> maps;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(directory, missing)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("array-") || !name.ends_with(".map")) continue;
    const auto number = parse_int(std::string_view(name).substr(6, name.size() - 10));
    if (!number || *number < 0) continue;
    const std::string text = read_file(entry.path(), 64 << 20);
    for (const std::string_view line : split(text, '\n'))
      if (!line.empty()) maps[*number].emplace_back(line);
  }
  return maps;
}

// The array of each job that was submitted.
std::map<std::string, int64_t> submitted_jobs(const fs::path& directory) {
  std::map<std::string, int64_t> jobs;
  std::ifstream file(directory / "jobs.jsonl");
  for (std::string line; std::getline(file, line);) {
    const Json row = json_of(line, IfNotJson::discard);
    if (row.is_object() && row.contains("array") && row["array"].is_number_integer() && row.contains("job") &&
        row["job"].is_string())
      jobs[row["job"]] = row["array"];
  }
  return jobs;
}

std::optional<int64_t> limit_of_scontrol() {
  const auto answer = run_process({"scontrol", "show", "config"}, kSlurmTimeout);
  if (!answer || answer->code != 0) return std::nullopt;
  for (const std::string_view line : split(answer->out, '\n')) {
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos || trim(line.substr(0, equals)) != "MaxArraySize") continue;
    const auto size = parse_int(trim(line.substr(equals + 1)));
    // The largest number is one less.
    if (size && *size > 1) return *size - 1;
  }
  return std::nullopt;
}

}  // namespace

std::vector<SlurmArray> slurm_arrays(const Plan& plan,
                                     const std::map<int64_t, std::vector<std::string>>& written,
                                     int64_t limit) {
  std::vector<SlurmArray> arrays;
  std::set<std::string> placed;
  int64_t next = 0;
  for (const auto& [number, trials] : written) {
    next = std::max(next, number + 1);
    SlurmArray array{number, 1, std::nullopt, trials, {}};
    const TrialPlan* first = nullptr;
    for (const std::string& id : trials) {
      placed.insert(id);
      if (!first) first = plan.find(id);
    }
    // The plan of these tasks does not exist any more.
    if (!first) continue;
    array.ranks = first->ranks;
    array.threads = first->threads;
    arrays.push_back(std::move(array));
  }
  // Groups in the order in which the plan first needs them.
  std::vector<std::pair<std::pair<int64_t, std::optional<int64_t>>, std::vector<std::string>>> groups;
  for (const TrialPlan& trial : plan.trials) {
    if (placed.contains(trial.id)) continue;
    const std::pair resources{trial.ranks, trial.threads};
    auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == resources; });
    if (group == groups.end()) group = groups.insert(groups.end(), {resources, {}});
    group->second.push_back(trial.id);
  }
  for (const auto& [resources, trials] : groups)
    for (size_t begin = 0; begin < trials.size(); begin += static_cast<size_t>(limit)) {
      const size_t end = std::min(trials.size(), begin + static_cast<size_t>(limit));
      arrays.push_back({next++,
                        resources.first,
                        resources.second,
                        {trials.begin() + static_cast<std::ptrdiff_t>(begin),
                         trials.begin() + static_cast<std::ptrdiff_t>(end)},
                        {}});
    }
  return arrays;
}

std::string task_list(const std::vector<int64_t>& tasks) {
  std::string text;
  for (size_t i = 0; i < tasks.size();) {
    size_t end = i;
    while (end + 1 < tasks.size() && tasks[end + 1] == tasks[end] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(tasks[i]);
    if (end > i) text += (end > i + 1 ? "-" : ",") + std::to_string(tasks[end]);
    i = end + 1;
  }
  return text;
}

static std::string array_option(const SlurmArray& array, const SlurmScript& script) {
  return "--array=" + task_list(array.tasks) +
         (script.max_parallel ? "%" + std::to_string(*script.max_parallel) : std::string());
}

std::string slurm_script(const SlurmArray& array, const SlurmScript& script) {
  const Cluster& cluster = script.cluster;
  std::string text = "#!/bin/bash\n";
  const auto header = [&](const std::string& option) { text += "#SBATCH " + option + "\n"; };
  header("--job-name=" + job_name(script.name, array.number));
  header(array_option(array, script));
  header("--output=\"" + in_header(script.sweep) + "/slurm/%A_%a.txt\"");
  header("--open-mode=append");
  header("--requeue");
  header("--signal=B:USR1@" + std::to_string(cluster.signal_seconds));
  header("--ntasks=" + std::to_string(array.ranks));
  if (cluster.ranks_per_node)
    header("--ntasks-per-node=" + std::to_string(std::min(array.ranks, *cluster.ranks_per_node)));
  if (const auto threads = array.threads ? array.threads : cluster.cpus_per_rank)
    header("--cpus-per-task=" + std::to_string(*threads));
  if (cluster.gpus_per_rank) header("--gpus-per-task=" + std::to_string(*cluster.gpus_per_rank));
  const auto seconds = cluster.time ? std::optional(cluster.time->seconds) : script.seconds;
  if (seconds)
    header("--time=" + std::to_string(std::max<int64_t>(1, static_cast<int64_t>(std::ceil(*seconds / 60)))));
  const std::pair<const char*, const std::optional<std::string>*> named[] = {
      {"--partition=", &cluster.partition},
      {"--account=", &cluster.account},
      {"--qos=", &cluster.qos},
      {"--constraint=", &cluster.constraint},
      {"--reservation=", &cluster.reservation},
      {"--mem=", &cluster.memory}};
  for (const auto& [option, value] : named)
    if (*value) header(option + **value);
  for (const std::string& option : cluster.sbatch) header(option);

  text +=
      "\n# Task N runs the trial of line N of the map. A signal asks the trial to save; then this task goes "
      "back to the\n"
      "# queue, and the trial continues from its checkpoint.\n"
      "sweep=" +
      shell_quoted(script.sweep) +
      "\n"
      "capstan=" +
      shell_quoted(script.program) + "\n";
  if (cluster.mpi) text += "export SLURM_MPI_TYPE=" + shell_quoted(*cluster.mpi) + "\n";
  for (const std::string& line : cluster.setup) text += line + "\n";
  text +=
      "\ntrial=$(sed -n \"${SLURM_ARRAY_TASK_ID}p\" \"$sweep/slurm/" + file_of(array.number, ".map") +
      "\")\n"
      "if [ -z \"$trial\" ]; then\n"
      "  echo \"the map has no line $SLURM_ARRAY_TASK_ID\" >&2\n"
      "  exit 2\n"
      "fi\n"
      "runner='' asked=no requeue=yes\n"
      "trap 'asked=yes; [ -z \"$runner\" ] || kill -USR1 \"$runner\" 2>/dev/null' USR1\n"
      "trap 'asked=yes requeue=no; [ -z \"$runner\" ] || kill -TERM \"$runner\" 2>/dev/null' TERM INT\n"
      "\"$capstan\" sweep run \"$sweep\" --trial \"$trial\" --slots 1 --launcher srun &\n"
      "runner=$!\n"
      "[ \"$asked\" = no ] || kill -USR1 \"$runner\" 2>/dev/null\n"
      "\n"
      "# A signal ends `wait` early, and then the code is not the runner's; 127: it was reported before.\n"
      "while :; do\n"
      "  asked=no\n"
      "  wait \"$runner\"\n"
      "  ended=$?\n"
      "  [ \"$ended\" -eq 127 ] && break\n"
      "  code=$ended\n"
      "  [ \"$asked\" = no ] && break\n"
      "done\n"
      "\n"
      "# 75: saved; 138: signaled before it could listen, and nothing was begun.\n"
      "[ \"$code\" -ne 138 ] || code=75\n"
      "if [ \"$code\" -eq 75 ] && [ \"$requeue\" = yes ] && [ \"${SLURM_RESTART_COUNT:-0}\" -lt " +
      std::to_string(cluster.max_requeues) +
      " ]; then\n"
      "  scontrol requeue \"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}\"\n"
      "fi\n"
      "exit \"$code\"\n";
  return text;
}

SlurmPlan write_slurm(const Store& store, const SlurmOptions& options) {
  const fs::path directory = fs::absolute(store.directory()).lexically_normal() / "slurm";
  SlurmPlan plan;
  plan.limit = kArrayMax;
  if (options.array_max) {
    plan.limit = *options.array_max;
    plan.limit_origin = SlurmPlan::LimitOrigin::options;
  } else if (options.cluster.array_max) {
    plan.limit = *options.cluster.array_max;
    plan.limit_origin = SlurmPlan::LimitOrigin::cluster;
  } else if (const auto limit = limit_of_scontrol()) {
    plan.limit = *limit;
    plan.limit_origin = SlurmPlan::LimitOrigin::scontrol;
  }
  SlurmScript script;
  script.sweep = directory.parent_path().string();
  if (script.sweep.find('\n') != std::string::npos)
    fail(ErrorCode::usage, "a batch script cannot name a directory with a line break in it");
  script.program = options.program;
  script.name = store.plan().name;
  script.cluster = options.cluster;
  if (const auto limit = store.plan().definition.limits.per_trial) script.seconds = limit->seconds;
  script.max_parallel = options.max_parallel ? options.max_parallel : options.cluster.max_parallel;

  const auto tasks = slurm_tasks(store.directory());
  for (SlurmArray& array : slurm_arrays(store.plan(), written_maps(directory), plan.limit)) {
    for (size_t i = 0; i < array.trials.size(); ++i) {
      const std::string& id = array.trials[i];
      if (!store.plan().find(id)) continue;
      const State state = store.state(id);
      if (state != State::pending && state != State::lost) continue;
      if (const auto task = tasks.find(id); task != tasks.end() && task->second.in_queue) {
        ++plan.queued;
        continue;
      }
      array.tasks.push_back(static_cast<int64_t>(i) + 1);
    }
    if (array.tasks.empty()) continue;
    fs::create_directories(directory);
    write_file_durably(directory / file_of(array.number, ".map"), join(array.trials, "\n") + "\n");
    const fs::path file = directory / file_of(array.number, ".sh");
    write_file_durably(file, slurm_script(array, script));
    // sbatch only reads the script. The execute bit shows people that it is a script.
    std::error_code ignored;
    fs::permissions(file, fs::perms::owner_exec, fs::perm_options::add, ignored);
    plan.scripts.push_back(file.string());
    // As in the script's head, so that a command that is copied later still names its tasks.
    plan.commands.push_back({"sbatch", array_option(array, script), file.string()});
    plan.arrays.push_back(std::move(array));
  }
  return plan;
}

std::string submit_slurm(const Store& store, const SlurmPlan& plan, size_t index) {
  std::vector<std::string> command = plan.commands[index];
  command.insert(command.begin() + 1, "--parsable");
  const auto answer = run_process(command, 3 * kSlurmTimeout);
  if (!answer)
    fail(ErrorCode::failed, "`sbatch` was not found or did not answer", "submit on a machine of the cluster");
  if (answer->code != 0)
    fail(ErrorCode::failed,
         "`sbatch` refused `" + plan.scripts[index] + "`: " + std::string(trim(answer->err)));
  // "123" or "123;cluster"
  std::string job(trim(split(answer->out, ';')[0]));
  const std::string line =
      dump_json(Json{{"array", plan.arrays[index].number}, {"job", job}, {"submitted", records::utc_now()}}) +
      "\n";
  std::ofstream file(store.directory() / "slurm" / "jobs.jsonl", std::ios::app);
  if (!(file << line << std::flush))
    fail(ErrorCode::io,
         "cannot record job " + job + " in `" + (store.directory() / "slurm/jobs.jsonl").string() + "`");
  return job;
}

std::map<std::string, SlurmTask> slurm_tasks(const fs::path& directory) {
  std::map<std::string, SlurmTask> tasks;
  const std::map<std::string, int64_t> jobs = submitted_jobs(directory / "slurm");
  if (jobs.empty()) return tasks;
  const auto maps = written_maps(directory / "slurm");
  std::vector<std::string> numbers;
  numbers.reserve(jobs.size());
  for (const auto& [job, array] : jobs) numbers.push_back(job);
  const auto note = [&](const std::string& job, std::string_view task, SlurmTask what) {
    const auto array = jobs.find(job);
    const auto number = parse_int(task);
    if (array == jobs.end() || !number || *number < 1) return;
    const auto map = maps.find(array->second);
    if (map == maps.end() || static_cast<size_t>(*number) > map->second.size()) return;
    what.job = job + "_" + std::string(task);
    tasks[map->second[static_cast<size_t>(*number) - 1]] = std::move(what);
  };
  // Tasks that left the queue come first, so that queued ones override them. Without accounting sacct fails,
  // which is ignored.
  if (const auto answer = run_process(
          {"sacct", "-n", "-P", "-X", "--format=JobID,State", "-j", join(numbers, ",")}, kSlurmTimeout);
      answer && answer->code == 0)
    for (const std::string_view line : split(answer->out, '\n')) {
      const auto cells = split(line, '|');
      const size_t underscore = cells[0].find('_');
      if (cells.size() < 2 || underscore == std::string_view::npos) continue;
      note(std::string(cells[0].substr(0, underscore)), cells[0].substr(underscore + 1),
           {{}, std::string(split(cells[1], ' ')[0]), {}, false});
    }
  // One job at a time: squeue refuses a list with a job that it has forgotten.
  for (const std::string& number : numbers) {
    const auto answer =
        run_process({"squeue", "-h", "--array", "-j", number, "-o", "%F|%K|%T|%r"}, kSlurmTimeout);
    // Slurm is not installed.
    if (!answer) break;
    if (answer->code != 0) continue;
    for (const std::string_view line : split(answer->out, '\n')) {
      const auto cells = split(line, '|');
      if (cells.size() < 4) continue;
      const std::string state(trim(cells[2]));
      const bool over =
          state == "COMPLETED" || state == "FAILED" || state == "CANCELLED" || state == "TIMEOUT";
      note(std::string(trim(cells[0])), trim(cells[1]), {{}, state, std::string(trim(cells[3])), !over});
    }
  }
  return tasks;
}

}  // namespace capstan::sweep
