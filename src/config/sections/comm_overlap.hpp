// Overlap of communication with computation. The overlaps of data parallelism are fields of `ddp`.
#pragma once

#include <cstdint>
#include <optional>

namespace capstan::config {

struct CommOverlapConfig {
  bool tp_comm_overlap = false;
  int64_t tp_comm_num_splits = 4;
  // Derived: true with virtual stages.
  std::optional<bool> overlap_p2p_comm;
  // Derived: PP > 1 without virtual stages.
  std::optional<bool> batch_p2p_comm;
  bool overlap_param_gather_with_optimizer_step = false;
  bool defer_embedding_wgrad_compute = false;
  int64_t wgrad_deferral_limit = 0;
  bool overlap_moe_expert_parallel_comm = false;
  bool delay_wgrad_compute = false;
};

}  // namespace capstan::config
