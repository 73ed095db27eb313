#include "config/sections/conditions.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool has_context(const Config& c) {
  return c.dist.context_parallel_size > 1;
}
}  // namespace

void describe(Section<DistConfig>& s) {
  using D = DistConfig;
  const char* pipeline = "`dist.pipeline_model_parallel_size` is above 1";
  const char* context = "`dist.context_parallel_size` is above 1";
  s.doc("number of ranks and parallelism along each axis");
  s.field("world_size", &D::world_size)
      .doc("total number of ranks, one per device")
      .unit("ranks")
      .count()
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .known_as("num_gpus");
  s.field("tensor_model_parallel_size", &D::tensor_model_parallel_size)
      .doc(
          "tensor-parallel ranks: the weight matrices of each layer are sharded over them (TP); usually "
          "within one node")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("tp")
      .alias("model.tensor_model_parallel_size");
  s.field("pipeline_model_parallel_size", &D::pipeline_model_parallel_size)
      .doc("pipeline stages over which the layers are partitioned (PP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("pp")
      .alias("model.pipeline_model_parallel_size");
  s.field("context_parallel_size", &D::context_parallel_size)
      .doc("context-parallel ranks: each sequence is partitioned over them (CP); for long sequences")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("cp")
      .alias("model.context_parallel_size");
  s.field("expert_model_parallel_size", &D::expert_model_parallel_size)
      .doc(
          "expert-parallel ranks over which the experts are distributed (EP), out of the ranks of a pipeline "
          "stage (DP, CP and TP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("ep")
      .alias("model.expert_model_parallel_size");
  s.field("expert_tensor_parallel_size", &D::expert_tensor_parallel_size)
      .doc("tensor-parallel ranks of each expert (ETP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("etp")
      .alias("model.expert_tensor_parallel_size")
      .used_when<Config>("`model.num_moe_experts` is set", has_experts);
  s.field("data_parallel_size", &D::data_parallel_size)
      .doc("data-parallel replicas of the model (DP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("dp");
  s.field("expert_data_parallel_size", &D::expert_data_parallel_size)
      .doc("data-parallel replicas of each expert (EDP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("edp")
      .used_when<Config>("`model.num_moe_experts` is set", has_experts);

  s.field("virtual_pipeline_model_parallel_size", &D::virtual_pipeline_model_parallel_size)
      .doc("model chunks per pipeline rank for the interleaved and the V-shaped schedule (VPP)")
      .unit("chunks")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("vp")
      .alias("vpp")
      .alias("model.virtual_pipeline_model_parallel_size");
  s.field("num_layers_per_virtual_pipeline_stage", &D::num_layers_per_virtual_pipeline_stage)
      .doc("layers per model chunk, instead of virtual_pipeline_model_parallel_size")
      .unit("layers")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("model.num_layers_per_virtual_pipeline_stage")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("pipeline_model_parallel_layout", &D::pipeline_model_parallel_layout)
      .doc(
          "stages in full: E embedding, t transformer layer, m multi-token prediction, L output layer and "
          "loss, | between stages, *n repeats")
      .effect(Effect::perf)
      .alias("model.pipeline_model_parallel_layout")
      .example("Et*3|(tt|)*29,L")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("num_layers_in_first_pipeline_stage", &D::num_layers_in_first_pipeline_stage)
      .doc("layers of the first pipeline stage")
      .unit("layers")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("model.num_layers_in_first_pipeline_stage")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("num_layers_in_last_pipeline_stage", &D::num_layers_in_last_pipeline_stage)
      .doc("layers of the last pipeline stage")
      .unit("layers")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("model.num_layers_in_last_pipeline_stage")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("account_for_embedding_in_pipeline_split", &D::account_for_embedding_in_pipeline_split)
      .doc("count the embedding as one layer of the first stage when the layers are partitioned")
      .effect(Effect::perf)
      .alias("model.account_for_embedding_in_pipeline_split")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("account_for_loss_in_pipeline_split", &D::account_for_loss_in_pipeline_split)
      .doc("count the output layer and loss as one layer of the last stage when the layers are partitioned")
      .effect(Effect::perf)
      .alias("model.account_for_loss_in_pipeline_split")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("microbatch_group_size_per_vp_stage", &D::microbatch_group_size_per_vp_stage)
      .doc("consecutive micro-batches that one model chunk runs before the next chunk continues")
      .unit("micro-batches")
      .range(1, 1 << 30)
      .effect(Effect::perf)
      .used_when<Config>(pipeline, has_pipeline)
      .used_when<Config>(
          "`dist.virtual_pipeline_model_parallel_size` is above 1",
          [](const Config& c) { return c.dist.virtual_pipeline_model_parallel_size.value_or(1) > 1; })
      .used_when<Config>("`dist.pipeline_schedule` is not zb_v",
                         [](const Config& c) { return c.dist.pipeline_schedule != PipelineSchedule::zb_v; });
  s.field("pipeline_schedule", &D::pipeline_schedule)
      .doc("pipeline schedule: order of the forward and backward passes of the micro-batches")
      .effect(Effect::perf)
      .used_when<Config>(pipeline, has_pipeline);
  s.field("variable_seq_lengths", &D::variable_seq_lengths)
      .doc(
          "micro-batches may differ in sequence length; accepted for compatibility, any length works either "
          "way")
      .effect(Effect::perf)
      .alias("model.variable_seq_lengths")
      .used_when<Config>(pipeline, has_pipeline);

  s.field("sequence_parallel", &D::sequence_parallel)
      .doc(
          "partition norms, dropout and residuals along the sequence over the tensor-parallel ranks (SP); "
          "saves activation memory")
      .effect(Effect::memory)
      .alias("sp")
      .alias("model.sequence_parallel");
  s.field("cp_comm_type", &D::cp_comm_type)
      .doc("exchange of keys and values between context-parallel ranks; one value, or one per layer")
      .scalar_ok()
      .effect(Effect::perf)
      .alias("model.cp_comm_type")
      .used_when<Config>(context, has_context);
  s.field("hierarchical_context_parallel_sizes", &D::hierarchical_context_parallel_sizes)
      .doc("for a2a+p2p: [ranks per inner group, number of groups]")
      .unit("ranks")
      .effect(Effect::perf)
      .alias("model.hierarchical_context_parallel_sizes")
      .used_when<Config>(context, has_context);
  s.field("use_tp_pp_dp_mapping", &D::use_tp_pp_dp_mapping)
      .doc("order the ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp")
      .effect(Effect::perf);
  s.field("distributed_backend", &D::distributed_backend)
      .doc("communication library of the collectives")
      .effect(Effect::perf);
}

}  // namespace capstan::config
