// FLOPs, memory, bytes sent and kernel launches of a step, found by running its passes and update on the
// `meta` device.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "config/sections/config.hpp"
#include "tensor/device.hpp"
#include "train/setup/transport.hpp"

namespace capstan::train {

struct StepEstimate {
  // Forward, backward and weight gradients of one micro-batch, this rank's part.
  double flops = 0;
  // FLOPs with those of recomputation.
  double executed_flops = 0;
  // Memory of a full step of one rank, on the device and on the host; a device that shares the host's memory
  // has one kind.
  MemoryUse memory, host_memory;
  // Bytes of data that the host holds in addition to the loader's; included in the memory above.
  int64_t resident_data = 0;
  // Size of the file of this rank's optimizer state (optimizer.optimizer_offload_path).
  int64_t state_file = 0;
  // Bytes that this rank sends in a step, by group.
  std::map<std::string, int64_t> sent;
  // Kernels that this rank launches in a step, by queue, and all of them.
  std::array<int64_t, kQueues> launches_by_queue{};
  int64_t launches() const;
  // Transport of the estimated ranks.
  Transport transport = Transport::host;
  // Bytes that a step copies from the host to the device, and back.
  int64_t copied_to_device = 0, copied_to_host = 0;
};
// Estimates a step of rank `rank` in the recipe's world (dist.world_size), which need not run. local_ranks:
// number of ranks on its host, over which the cores are divided if train.threads is not set. resident_data:
// bytes of data and of their indices that the host holds (train::resident_data()). transport: nullopt for
// planned_transport(). runs_all: all micro-batches run, where else a few run and their memory is played for
// the others (memory_trace.hpp); the results are the same.
StepEstimate estimate_step(const config::Config& config, int64_t rank = 0, int local_ranks = 1,
                           int64_t resident_data = 0, std::optional<Transport> transport = std::nullopt,
                           bool runs_all = false);

// Runs the passes and the update of one step, with the fewest micro-batches that fill the pipeline, on a
// device of the type `meta`: that of a test may run kernels.
void run_meta_step(const config::Config& config, Device& device, int64_t rank = 0);

// Adds bytes of data that the host holds for the full run.
MemoryUse with_resident_data(MemoryUse use, int64_t bytes);

}  // namespace capstan::train
