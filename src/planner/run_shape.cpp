#include "planner/run_shape.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/moe_layers.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "planner/adapters.hpp"

namespace capstan::planner {

namespace {

double bytes_of(config::Precision precision) {
  return precision == config::Precision::fp32 ? 4 : 2;
}

double bytes_of(config::MomentType type) {
  switch (type) {
    case config::MomentType::fp32:
      return 4;
    case config::MomentType::bf16:
    case config::MomentType::fp16:
      return 2;
    case config::MomentType::fp8:
      break;
  }
  return 1 + 4.0 / 64;  // with an fp32 scale per 64 elements
}

// RunShape::saved_operand_bytes.
double saved_operand_bytes(const config::MixedPrecisionConfig& precision) {
  if (precision.fp4) return 0.5 + 1.0 / 16;
  if (!precision.fp8 || !precision.fp8_wgrad) return bytes_of(precision.params_dtype);
  const bool blocks = precision.fp8_recipe == config::Fp8Recipe::mxfp8 ||
                      precision.fp8_recipe == config::Fp8Recipe::blockwise;
  return blocks ? 1 + 1.0 / 32 : 1;
}

void set_formats(RunShape& s, const config::Config& config) {
  const config::MixedPrecisionConfig& precision = config.mixed_precision;
  const config::OptimizerConfig& optimizer = config.optimizer;
  const bool fp32 = precision.params_dtype == config::Precision::fp32;
  s.format = precision.fp4    ? GemmFormat::fp4
             : precision.fp8  ? GemmFormat::fp8
             : !fp32          ? GemmFormat::bf16
             : precision.tf32 ? GemmFormat::tf32
                              : GemmFormat::fp32;
  s.parameter_bytes = s.activation_bytes = bytes_of(precision.params_dtype);
  if (precision.fp8 && precision.fp8_recipe == config::Fp8Recipe::tensorwise) s.quantized_bytes = 6;
  if (precision.fp4) s.quantized_bytes = 7;
  if (precision.fp8) s.code_bytes = precision.fp8_recipe == config::Fp8Recipe::mxfp8 ? 1 + 1.0 / 32 : 1;
  if (precision.fp4) s.code_bytes = 0.5 + 1.0 / 16;
  s.saved_operand_bytes = saved_operand_bytes(precision);
  s.gathers_codes = precision.fp8 && precision.fp8_param_gather;
  // One layout, of which the GEMM of weight gradients reads none.
  s.low_weight_gradients = !precision.fp8 || precision.fp8_wgrad;
  if (!s.low_weight_gradients) s.quantized_bytes -= 1;
  if (precision.first_last_layers_bf16) {
    s.first_high_layers = precision.num_layers_at_start_in_bf16;
    s.last_high_layers = precision.num_layers_at_end_in_bf16;
  }
  const bool aware = optimizer.use_precision_aware_optimizer;
  s.gradient_bytes = aware ? bytes_of(optimizer.main_grads_dtype) : 4;
  s.buffered_reductions = true;
  s.reduced_bytes = fp32 || precision.grad_reduce_in_fp32 ? s.gradient_bytes : 2;
  // In fp32; their gradients take the same place.
  s.logit_bytes = 4, s.chunked_logits = true;
  // bf16 weights without main parameters.
  s.main_bytes = fp32 || (aware && optimizer.main_params_dtype != config::Precision::fp32) ? 0 : 4;
  const double first = aware ? bytes_of(optimizer.exp_avg_dtype) : 4;
  const double second = aware ? bytes_of(optimizer.exp_avg_sq_dtype) : 4;
  switch (optimizer.optimizer) {
    case config::OptimizerKind::adam:
      s.moment_bytes = first + second;
      break;
    case config::OptimizerKind::sgd:
      s.moment_bytes = optimizer.sgd_momentum > 0 ? first : 0;
      break;
    case config::OptimizerKind::muon:
      s.muon = {optimizer.muon_num_ns_steps, optimizer.muon_split_qkv, optimizer.muon_tp_mode};
      s.moment_bytes = first;
      break;
    case config::OptimizerKind::lion:
      s.moment_bytes = first;
      break;
  }
}

// ExpertShape::filled.
double filled_rows(const config::ModelConfig& m) {
  if (!m.moe_expert_capacity_factor) return 1;
  return m.moe_pad_expert_input_to_capacity ? *m.moe_expert_capacity_factor
                                            : std::min(1.0, *m.moe_expert_capacity_factor);
}

void set_model(RunShape& s, const config::ModelConfig& m) {
  s.layers = m.num_layers, s.hidden = m.hidden_size, s.heads = m.num_attention_heads;
  s.kv_groups = m.num_query_groups.value_or(s.heads);
  s.head_dim = m.kv_channels.value_or(s.hidden / s.heads);
  s.ffn = m.ffn_hidden_size.value_or(4 * s.hidden);
  s.vocab = m.padded_vocab_size.value_or(m.vocab_size);
  s.seq = m.seq_length;
  s.gated = m.gated_linear_unit, s.tied = m.share_embeddings_and_output_weights;
  if (m.position_embedding_type == config::PositionEmbedding::learned_absolute)
    s.positions = m.max_position_embeddings.value_or(m.seq_length);
  s.norm_vectors = m.normalization == config::Normalization::layer_norm ? 2 : 1;
  s.norms_per_layer = m.norm_placement == config::NormPlacement::both ? 4 : 2;
  s.input_norms = m.norm_placement != config::NormPlacement::output;
  s.qkv_bias = m.add_bias_linear || m.add_qkv_bias;
  s.output_bias = m.add_attention_output_bias.value_or(m.add_bias_linear);
  s.mlp_bias = config::has_mlp_biases(m);
  if (m.qk_layernorm && !m.multi_latent_attention)
    s.qk_norm_parameters =
        s.norm_vectors * (m.qk_layernorm_across_heads ? s.query_width() + s.kv_width() : 2 * s.head_dim);
  s.qk_norm_across_heads = s.qk_norm_parameters > 0 && m.qk_layernorm_across_heads;
  if (m.softmax_type == config::SoftmaxType::learnable) s.sink_parameters = s.heads;
  s.hidden_dropout = m.hidden_dropout > 0;
  s.window = m.window_size.value_or(0), s.full_every = m.window_attn_skip_freq.value_or(0);
  s.mtp_layers = m.mtp_num_layers.value_or(0);
  if (m.num_moe_experts)
    s.experts = ExpertShape{*m.num_moe_experts,
                            m.moe_router_topk,
                            m.moe_ffn_hidden_size.value_or(s.ffn),
                            m.moe_shared_expert_intermediate_size.value_or(0),
                            config::moe_layers(m),
                            m.moe_router_group_topk.value_or(0),
                            (m.moe_router_enable_expert_bias ? 1 : 0) + (config::has_mlp_biases(m) ? 1 : 0),
                            filled_rows(m),
                            m.moe_expert_capacity_factor,
                            true};
  if (m.multi_latent_attention)
    s.latent = LatentShape{m.qk_layernorm, m.q_lora_rank.value_or(0), m.kv_lora_rank,
                           m.qk_head_dim,  m.qk_pos_emb_head_dim,     m.v_head_dim};
}

void set_recompute(RunShape& s, const config::ModelConfig& model) {
  if (!model.recompute_granularity) return;
  RecomputeShape& r = s.recompute;
  r.full = *model.recompute_granularity == config::RecomputeGranularity::full;
  if (r.full && model.recompute_method == config::RecomputeMethod::block)
    r.layers = model.recompute_num_layers.value_or(1);
  if (r.full) return;
  for (const config::RecomputeModule module : model.recompute_modules) switch (module) {
      case config::RecomputeModule::core_attn:
      case config::RecomputeModule::mla_up_proj:
        r.attention = true;
        break;
      case config::RecomputeModule::layernorm:
        r.norms = true;
        break;
      case config::RecomputeModule::mlp:
        r.mlp = true;
        break;
      case config::RecomputeModule::moe:
        r.experts = true;
        break;
      case config::RecomputeModule::shared_experts:
        r.shared = true;
        break;
      case config::RecomputeModule::moe_act:
        r.activation = true;
        break;
    }
}

// Frozen weights, and the adapters beside them.
void set_adapters(RunShape& s, const config::Config& config) {
  if (!config.peft) return;
  s.adapters = adapter_shape(s, config.model, *config.peft);
  if (config.peft->base_quantization == config::BaseQuantization::nf4)
    s.frozen_bytes = 0.5 + 1.0 / static_cast<double>(config.peft->quantization_block);
}

ContextExchange exchange_of(config::CpCommType type) {
  switch (type) {
    case config::CpCommType::p2p:
      return ContextExchange::ring;
    case config::CpCommType::all_gather:
      return ContextExchange::all_gather;
    case config::CpCommType::a2a:
    case config::CpCommType::a2a_p2p:
      break;
  }
  return ContextExchange::all_to_all;
}

}  // namespace

double RunShape::expert_rows() const {
  const ExpertShape& e = *experts;
  const double n = tokens() / real(sequence_parallel ? tp : 1);
  if (dispatch != TokenDispatch::allgather && ep > 1) return n * real(e.topk * etp) * e.filled;
  // Without sequence parallelism tensor-parallel ranks have the same tokens.
  const double all = n * real(sequence_parallel || tp == 1 ? ep * etp : 1);
  const double balanced = all * real(e.topk) / real(ep);
  const double most = all * real(std::min(e.topk, e.count / ep));
  return e.capacity ? std::max(e.filled * balanced, std::min(*e.capacity * balanced, most)) : most;
}

RunShape run_shape(const config::Config& config) {
  RunShape s;
  set_model(s, config.model);
  set_formats(s, config);
  const config::DistConfig& dist = config.dist;
  s.tp = dist.tensor_model_parallel_size, s.pp = dist.pipeline_model_parallel_size;
  s.vpp = dist.virtual_pipeline_model_parallel_size.value_or(1), s.cp = dist.context_parallel_size;
  s.ep = dist.expert_model_parallel_size, s.etp = dist.expert_tensor_parallel_size.value_or(s.tp);
  s.dp = dist.data_parallel_size.value_or(dist.world_size / (s.tp * s.pp * s.cp));
  s.sequence_parallel = dist.sequence_parallel && s.tp > 1;
  s.sharding = config.ddp.data_parallel_sharding_strategy;
  s.instances = config.ddp.num_distributed_optimizer_instances;
  s.shards_over_instances = config.ddp.outer_dp_sharding_strategy != config::ShardingStrategy::no_shard;
  s.schedule = dist.pipeline_schedule.value_or(config::PipelineSchedule::one_f_one_b);
  s.group = dist.microbatch_group_size_per_vp_stage.value_or(s.pp);
  s.micro_batch = config.train.micro_batch_size;
  s.global_batch = config.train.global_batch_size ? config::full_batch_size(config) : s.micro_batch * s.dp;
  set_recompute(s, config.model);
  if (config.optimizer.optimizer_cpu_offload) s.offloaded_state = config.optimizer.optimizer_offload_fraction;
  if (config.model.cpu_offloading) s.offloaded_layers = config.model.cpu_offloading_num_layers;
  set_adapters(s, config);
  if (!dist.cp_comm_type.empty()) s.context_exchange = exchange_of(dist.cp_comm_type.front());
  if (config.model.moe_token_dispatcher_type == config::TokenDispatcher::allgather)
    s.dispatch = TokenDispatch::allgather;
  s.bucket_elements = config.ddp.bucket_size;
  s.overlap_grad_reduce = config.ddp.overlap_grad_reduce;
  s.overlap_param_gather = config.ddp.overlap_param_gather;
  s.overlap_tp = config.comm_overlap.tp_comm_overlap;
  s.overlap_p2p = config.comm_overlap.overlap_p2p_comm.value_or(false);
  s.overlap_ep = config.comm_overlap.overlap_moe_expert_parallel_comm;
  s.overlap_shared = config.model.moe_shared_expert_overlap;

  const auto stages = config::pipeline_stages(config);
  if (!stages) fail(ErrorCode::config, "the layers cannot be divided into pipeline stages");
  int64_t layer = 0, states = 1;
  for (const config::PipelineStage& stage : *stages) {
    StageShape& added = s.stages.emplace_back();
    added.embedding = stage.embedding, added.head = stage.loss, added.mtp_layers = stage.mtp_layers;
    added.states_out = states += stage.mtp_layers;
    for (int64_t i = 0; i < stage.layers; ++i, ++layer)
      ++(s.is_expert_layer(layer) ? added.expert_layers : added.dense_layers);
  }
  s.stage_ranks = config::stage_ranks(dist);
  return s;
}

void split_evenly(RunShape& s) {
  const int64_t count = s.pp * s.vpp;
  s.stages.assign(static_cast<size_t>(count), {});
  s.stage_ranks = config::stage_ranks(s.schedule, s.pp, s.vpp);
  int64_t layer = 0;
  for (int64_t i = 0; i < count; ++i) {
    StageShape& stage = s.stages[static_cast<size_t>(i)];
    const int64_t layers = s.layers / count + (i < s.layers % count ? 1 : 0);
    for (int64_t k = 0; k < layers; ++k, ++layer)
      ++(s.is_expert_layer(layer) ? stage.expert_layers : stage.dense_layers);
  }
  s.stages.front().embedding = true;
  s.stages.back().head = true;
  s.stages.back().mtp_layers = s.mtp_layers, s.stages.back().states_out = 1 + s.mtp_layers;
}

}  // namespace capstan::planner
