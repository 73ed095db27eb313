#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool has_pipeline(const Config& c) {
  return c.dist.pipeline_model_parallel_size > 1;
}
bool has_context(const Config& c) {
  return c.dist.context_parallel_size > 1;
}
bool has_experts(const Config& c) {
  return c.model.num_moe_experts.has_value();
}
bool above_one(const Value& v) {
  return !v.is_null() && v.integer > 1;
}
}  // namespace

void describe(Section<DistConfig>& s) {
  using D = DistConfig;
  const char* pipeline = "`dist.pipeline_model_parallel_size` is above 1";
  const char* context = "`dist.context_parallel_size` is above 1";
  s.doc("the ranks and the axes along which the work is split");
  s.field("world_size", &D::world_size)
      .doc("ranks, one for each device")
      .unit("ranks")
      .count()
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .known_as("num_gpus");
  s.field("tensor_model_parallel_size", &D::tensor_model_parallel_size)
      .doc("ranks that share each matrix product (TP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("tp")
      .alias("model.tensor_model_parallel_size");
  s.field("pipeline_model_parallel_size", &D::pipeline_model_parallel_size)
      .doc("stages that the layers are split into (PP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("pp")
      .alias("model.pipeline_model_parallel_size");
  s.field("context_parallel_size", &D::context_parallel_size)
      .doc("ranks that share each sequence (CP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("cp")
      .alias("model.context_parallel_size");
  s.field("expert_model_parallel_size", &D::expert_model_parallel_size)
      .doc("ranks that the experts are spread over, taken from the data-parallel ranks (EP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("ep")
      .alias("model.expert_model_parallel_size")
      .not_yet("expert parallelism", above_one);
  s.field("expert_tensor_parallel_size", &D::expert_tensor_parallel_size)
      .doc("ranks that share the matrix products of one expert (ETP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("etp")
      .alias("model.expert_tensor_parallel_size")
      .used_when<Config>("`model.num_moe_experts` is set", has_experts);
  s.field("data_parallel_size", &D::data_parallel_size)
      .doc("replicas of the model (DP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("dp");
  s.field("expert_data_parallel_size", &D::expert_data_parallel_size)
      .doc("replicas of each expert (EDP)")
      .unit("ranks")
      .range(1, 1 << 24)
      .effect(Effect::perf)
      .alias("edp")
      .used_when<Config>("`model.num_moe_experts` is set", has_experts);

  s.field("virtual_pipeline_model_parallel_size", &D::virtual_pipeline_model_parallel_size)
      .doc("chunks of layers on each pipeline rank (VPP)")
      .unit("chunks")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("vpp")
      .alias("model.virtual_pipeline_model_parallel_size");
  s.field("num_layers_per_virtual_pipeline_stage", &D::num_layers_per_virtual_pipeline_stage)
      .doc("the same, as layers of one chunk")
      .unit("layers")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("model.num_layers_per_virtual_pipeline_stage")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("pipeline_model_parallel_layout", &D::pipeline_model_parallel_layout)
      .doc(
          "the stages in full: E embedding, t layer, m predicted token, L head and loss, | between stages, "
          "*n times")
      .effect(Effect::perf)
      .alias("model.pipeline_model_parallel_layout")
      .example("Et*3|(tt|)*29,L")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("num_layers_in_first_pipeline_stage", &D::num_layers_in_first_pipeline_stage)
      .doc("layers of the first stage")
      .unit("layers")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("model.num_layers_in_first_pipeline_stage")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("num_layers_in_last_pipeline_stage", &D::num_layers_in_last_pipeline_stage)
      .doc("layers of the last stage")
      .unit("layers")
      .range(1, 1 << 20)
      .effect(Effect::perf)
      .alias("model.num_layers_in_last_pipeline_stage")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("account_for_embedding_in_pipeline_split", &D::account_for_embedding_in_pipeline_split)
      .doc("the embedding counts as one layer of the first stage")
      .effect(Effect::perf)
      .alias("model.account_for_embedding_in_pipeline_split")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("account_for_loss_in_pipeline_split", &D::account_for_loss_in_pipeline_split)
      .doc("head and loss count as one layer of the last stage")
      .effect(Effect::perf)
      .alias("model.account_for_loss_in_pipeline_split")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("microbatch_group_size_per_vp_stage", &D::microbatch_group_size_per_vp_stage)
      .doc("micro-batches that a chunk runs before the next chunk's turn")
      .unit("micro-batches")
      .range(1, 1 << 30)
      .effect(Effect::perf)
      .used_when<Config>(pipeline, has_pipeline)
      .used_when<Config>("`dist.virtual_pipeline_model_parallel_size` is above 1", [](const Config& c) {
        return c.dist.virtual_pipeline_model_parallel_size.value_or(1) > 1;
      });
  s.field("pipeline_schedule", &D::pipeline_schedule)
      .doc("order of forward and backward passes")
      .effect(Effect::perf)
      .used_when<Config>(pipeline, has_pipeline)
      .not_yet("a zero-bubble schedule", [](const Value& v) { return v.text == "zero_bubble"; });
  s.field("variable_seq_lengths", &D::variable_seq_lengths)
      .doc("micro-batches of different sequence lengths; stages of this engine take any length either way")
      .effect(Effect::perf)
      .alias("model.variable_seq_lengths")
      .used_when<Config>(pipeline, has_pipeline);

  s.field("sequence_parallel", &D::sequence_parallel)
      .doc("norms, dropout and residuals split over the sequence between tensor-parallel ranks (SP)")
      .effect(Effect::memory)
      .alias("sp")
      .alias("model.sequence_parallel");
  s.field("cp_comm_type", &D::cp_comm_type)
      .doc("how context-parallel ranks exchange keys and values; one, or one for each layer")
      .scalar_ok()
      .effect(Effect::perf)
      .alias("model.cp_comm_type")
      .used_when<Config>(context, has_context);
  s.field("hierarchical_context_parallel_sizes", &D::hierarchical_context_parallel_sizes)
      .doc("for a2a+p2p: ranks of a group, groups")
      .unit("ranks")
      .effect(Effect::perf)
      .alias("model.hierarchical_context_parallel_sizes")
      .used_when<Config>(context, has_context);
  s.field("use_tp_pp_dp_mapping", &D::use_tp_pp_dp_mapping)
      .doc("ranks in the order tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp")
      .effect(Effect::perf);
  s.field("distributed_backend", &D::distributed_backend)
      .doc("what carries collectives")
      .effect(Effect::perf)
      .not_yet("NCCL", [](const Value& v) { return v.text == "nccl"; });
}

}  // namespace capstan::config
