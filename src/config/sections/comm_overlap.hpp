// What is sent while something else is computed. The overlaps of data parallelism are fields of `ddp`.
#pragma once

#include <cstdint>
#include <optional>

namespace capstan::config {

struct CommOverlapConfig {
  bool tp_comm_overlap =
      false;  // split the GEMMs of tensor parallelism into chunks that overlap their collective
  int64_t tp_comm_num_splits = 4;        // chunks of one GEMM
  std::optional<bool> overlap_p2p_comm;  // derived: true with virtual stages
  std::optional<bool> batch_p2p_comm;    // derived: PP > 1 without virtual stages
  bool overlap_param_gather_with_optimizer_step = false;
  bool defer_embedding_wgrad_compute = false;
  int64_t wgrad_deferral_limit = 0;  // micro-batches; 0: all
  bool overlap_moe_expert_parallel_comm = false;
  bool delay_wgrad_compute = false;  // W steps of backward after its B steps
};

}  // namespace capstan::config
