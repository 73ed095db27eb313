// The cluster file: options of a batch script.
//
//   partition: cpu
//   account: language
//   time: 4h                       # of one task; else the sweep's limits.per_trial
//   ranks_per_node: 8
//   setup: [module load openmpi]   # lines of shell before the trial
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::sweep {

struct Cluster {
  std::optional<std::string> partition, account, qos, constraint, reservation, memory, mpi;
  std::optional<config::Duration> time;
  std::optional<int64_t> cpus_per_rank, gpus_per_rank, ranks_per_node, array_max, max_parallel;
  // Seconds before the end of the time limit at which a trial saves and is requeued.
  int64_t signal_seconds = 180;
  int64_t max_requeues = 100;
  std::vector<std::string> sbatch, setup;
};

// Throws ErrorCode::config with everything that is wrong, or ::not_found.
Cluster read_cluster(const std::string& file);

}  // namespace capstan::sweep
