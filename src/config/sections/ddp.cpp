#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<DdpConfig>& s) {
  using D = DdpConfig;
  s.doc("data parallelism: gradient reduction and sharding (ZeRO)");
  s.field("data_parallel_sharding_strategy", &D::data_parallel_sharding_strategy)
      .doc("state that is sharded over the data-parallel ranks (ZeRO stage); results do not depend on it")
      .effect(Effect::memory)
      .alias("sharding")
      .known_as("zero_stage")
      .known_as("use_distributed_optimizer")
      .known_as("use_megatron_fsdp")
      .known_as("fsdp");
  s.field("outer_dp_sharding_strategy", &D::outer_dp_sharding_strategy)
      .doc("state that is sharded between the replica groups of num_distributed_optimizer_instances (HSDP)")
      .effect(Effect::memory);
  s.field("num_distributed_optimizer_instances", &D::num_distributed_optimizer_instances)
      .doc("replica groups, each of which holds the full optimizer state (HSDP)")
      .unit("groups")
      .min(1)
      .effect(Effect::memory);
  s.field("overlap_grad_reduce", &D::overlap_grad_reduce)
      .doc("overlap gradient reduction, bucket by bucket, with the backward pass")
      .effect(Effect::perf)
      .alias("comm_overlap.overlap_grad_reduce");
  s.field("overlap_param_gather", &D::overlap_param_gather)
      .doc("overlap the all-gather of parameters, bucket by bucket, with the forward pass")
      .effect(Effect::perf)
      .alias("comm_overlap.overlap_param_gather")
      .alias("optimizer.overlap_param_gather");
  s.field("align_param_gather", &D::align_param_gather)
      .doc("all pipeline stages all-gather parameters at the same time")
      .effect(Effect::perf)
      .alias("comm_overlap.align_param_gather")
      .unsupported("aligned gathering of parameters");
  s.field("bucket_size", &D::bucket_size)
      .doc(
          "parameters per bucket of gradient reduction and parameter all-gather; null with sharded "
          "gradients: 1/16 of a rank's, 1M to 40M")
      .unit("parameters")
      .count()
      .min(1)
      .effect(Effect::perf)
      .alias("comm_overlap.bucket_size");
}

}  // namespace capstan::config
