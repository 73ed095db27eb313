// The world: how many ranks, and along which axes the work is split. Axis order tp-cp-ep-dp-pp, leftmost
// fastest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::config {

// The last is spelled a2a+p2p.
enum class CpCommType : uint8_t { p2p, all_gather, a2a, a2a_p2p };
enum class PipelineSchedule : uint8_t { gpipe, one_f_one_b, interleaved, zb_h1, zb_v, pipedream };
enum class DistributedBackend : uint8_t { automatic, mpi, nccl, nccl_stand_in };

template <>
struct EnumNames<CpCommType> {
  static constexpr EnumEntry<CpCommType> list[] = {
      {CpCommType::p2p, "p2p", "ring exchange of keys and values (ring attention)"},
      {CpCommType::all_gather, "all_gather", "all-gather of keys and values"},
      {CpCommType::a2a, "a2a", "all-to-all between sequence and heads (DeepSpeed-Ulysses)"},
      {CpCommType::a2a_p2p, "a2a+p2p", "a2a within a group, p2p between groups"},
  };
};

template <>
struct EnumNames<PipelineSchedule> {
  static constexpr EnumEntry<PipelineSchedule> list[] = {
      {PipelineSchedule::gpipe, "gpipe", "all forward passes, then all backward passes"},
      {PipelineSchedule::one_f_one_b, "1f1b",
       "one forward, one backward in the steady state (PipeDream-Flush)"},
      {PipelineSchedule::interleaved, "interleaved_1f1b", "1f1b over virtual stages", "interleaved"},
      {PipelineSchedule::zb_h1, "zb_h1", "1f1b with weight gradients moved into the bubble (ZB-H1)",
       "zero_bubble"},
      {PipelineSchedule::zb_v, "zb_v",
       "two virtual stages on each rank in the shape of a V, weight gradients in the bubble (ZB-V)"},
      {PipelineSchedule::pipedream, "pipedream", "no flush between steps: stale weights, refused"},
  };
};

template <>
struct EnumNames<DistributedBackend> {
  static constexpr EnumEntry<DistributedBackend> list[] = {
      {DistributedBackend::automatic, "auto",
       "nccl between GPUs of their own, where the library is there; else mpi"},
      {DistributedBackend::mpi, "mpi", "MPI"},
      {DistributedBackend::nccl, "nccl", "NCCL"},
      {DistributedBackend::nccl_stand_in, "nccl_stand_in",
       "for developers, on the checked or simulated device: transfers block and match as NCCL's"},
  };
};

struct DistConfig {
  int64_t world_size = 1;
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  int64_t expert_model_parallel_size = 1;
  // Derived: tensor_model_parallel_size.
  std::optional<int64_t> expert_tensor_parallel_size;
  // Derived: world_size / (TP * PP * CP).
  std::optional<int64_t> data_parallel_size;
  // Derived: world_size / (ETP * EP * PP).
  std::optional<int64_t> expert_data_parallel_size;

  // Derived from the layout or from the number of layers of a virtual stage, if one of them is given; 2 for
  // zb_v.
  std::optional<int64_t> virtual_pipeline_model_parallel_size;
  std::optional<int64_t> num_layers_per_virtual_pipeline_stage;
  std::optional<std::string> pipeline_model_parallel_layout;
  std::optional<int64_t> num_layers_in_first_pipeline_stage;
  std::optional<int64_t> num_layers_in_last_pipeline_stage;
  bool account_for_embedding_in_pipeline_split = false;
  bool account_for_loss_in_pipeline_split = false;
  // Derived: PP, not for zb_v.
  std::optional<int64_t> microbatch_group_size_per_vp_stage;
  // Derived: 1f1b, with virtual stages interleaved_1f1b.
  std::optional<PipelineSchedule> pipeline_schedule;
  bool variable_seq_lengths = false;

  bool sequence_parallel = false;
  std::vector<CpCommType> cp_comm_type = {CpCommType::p2p};
  std::vector<int64_t> hierarchical_context_parallel_sizes;
  bool use_tp_pp_dp_mapping = false;
  DistributedBackend distributed_backend = DistributedBackend::automatic;
};

}  // namespace capstan::config
