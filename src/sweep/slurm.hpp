// A sweep as Slurm job arrays. Tasks of an array have the same resources; a task runs the trial of its line
// in the map.
// Under DIR/slurm: array-K.sh, array-K.map, jobs.jsonl (what was submitted), and the tasks' output.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sweep/cluster.hpp"
#include "sweep/store.hpp"

namespace capstan::sweep {

struct SlurmArray {
  int64_t number = 0;
  int64_t ranks = 1;
  // Number of threads of one rank.
  std::optional<int64_t> threads;
  // Ids of the trials: task N runs trials[N - 1].
  std::vector<std::string> trials;
  // Numbers of the tasks to submit, ascending.
  std::vector<int64_t> tasks;
};

// Returns the arrays of a plan, without tasks. Maps that were written before keep their lines, because tasks
// in the queue look up their trials there. Trials that are in no map are grouped by resources and split at
// `limit`.
std::vector<SlurmArray> slurm_arrays(const Plan& plan,
                                     const std::map<int64_t, std::vector<std::string>>& written,
                                     int64_t limit);

struct SlurmScript {
  // Absolute path of the sweep's directory.
  std::string sweep;
  // Absolute path of this binary.
  std::string program;
  // Name of the job.
  std::string name;
  Cluster cluster;
  // Time limit of one task in seconds, if the cluster sets none.
  std::optional<double> seconds;
  std::optional<int64_t> max_parallel;
};
std::string slurm_script(const SlurmArray& array, const SlurmScript& script);

// "1-4,9,11-12"
std::string task_list(const std::vector<int64_t>& tasks);

struct SlurmOptions {
  std::string program;
  Cluster cluster;
  // Limits that take precedence over those of the cluster.
  std::optional<int64_t> array_max, max_parallel;
};
struct SlurmPlan {
  // Where the limit of tasks in an array comes from: SlurmOptions, the cluster's file, the configuration of
  // Slurm (scontrol), or its usual value.
  enum class LimitOrigin : uint8_t { options, cluster, scontrol, slurm_default };
  // The arrays that have tasks to submit.
  std::vector<SlurmArray> arrays;
  std::vector<std::string> scripts;
  // The sbatch commands.
  std::vector<std::vector<std::string>> commands;
  int64_t limit = 0;
  LimitOrigin limit_origin = LimitOrigin::slurm_default;
  // Number of trials left out because a job of theirs is in the queue.
  int64_t queued = 0;
};
// Writes scripts and maps for the trials that are pending or lost and in no job. Does not submit them.
SlurmPlan write_slurm(const Store& store, const SlurmOptions& options);

// Submits array `index`, records it in jobs.jsonl, and returns the number of the job. Throws
// ErrorCode::failed with the output of sbatch.
std::string submit_slurm(const Store& store, const SlurmPlan& plan, size_t index);

// The Slurm state of a sweep's tasks, by trial. Tasks in the queue come from squeue, tasks that left it from
// sacct. Empty if no job was submitted or the tools are not installed.
struct SlurmTask {
  // Number of job and task, such as "123_4".
  std::string job;
  // State in Slurm, such as "RUNNING".
  std::string state;
  // Why a pending task does not run yet.
  std::string reason;
  bool in_queue = false;
};
std::map<std::string, SlurmTask> slurm_tasks(const std::filesystem::path& directory);

}  // namespace capstan::sweep
