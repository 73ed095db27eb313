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
  std::optional<int64_t> threads;   // of one rank
  std::vector<std::string> trials;  // ids; task N is trials[N - 1]
  std::vector<int64_t> tasks;       // those to submit, ascending
};

// The arrays of a plan. Maps that were written before keep their lines, because tasks in the queue look
// trials up there; trials that are in none are grouped by resources and split at `limit`. Tasks are left
// empty.
std::vector<SlurmArray> slurm_arrays(const Plan& plan,
                                     const std::map<int64_t, std::vector<std::string>>& written,
                                     int64_t limit);

struct SlurmScript {
  std::string sweep;    // absolute directory
  std::string program;  // absolute path of this binary
  std::string name;     // of the job
  Cluster cluster;
  std::optional<double> seconds;  // of one task, where the cluster says nothing
  std::optional<int64_t> max_parallel;
};
std::string slurm_script(const SlurmArray& array, const SlurmScript& script);

// "1-4,9,11-12"
std::string task_list(const std::vector<int64_t>& tasks);

struct SlurmOptions {
  std::string program;
  Cluster cluster;
  std::optional<int64_t> array_max, max_parallel;  // before the cluster's
};
struct SlurmPlan {
  std::vector<SlurmArray> arrays;  // those with tasks to submit
  std::vector<std::string> scripts;
  std::vector<std::vector<std::string>> commands;  // sbatch …
  int64_t limit = 0;
  std::string limit_from;  // "--array-max", "scontrol", …
  int64_t queued = 0;      // trials left out because a job of theirs is in the queue
};
// Writes scripts and maps for the trials that are pending or lost and in no job. Submits nothing.
SlurmPlan write_slurm(const Store& store, const SlurmOptions& options);

// Submits array `index` and notes it in jobs.jsonl. Returns the job's number. Throws ErrorCode::failed with
// what sbatch said.
std::string submit_slurm(const Store& store, const SlurmPlan& plan, size_t index);

// The Slurm state of a sweep's tasks, by trial: from squeue, and for those that left the queue from sacct.
// Empty where nothing was submitted or the tools are not there.
struct SlurmTask {
  std::string job;     // "123_4"
  std::string state;   // "RUNNING"
  std::string reason;  // of a pending one
  bool in_queue = false;
};
std::map<std::string, SlurmTask> slurm_tasks(const std::filesystem::path& directory);

}  // namespace capstan::sweep
