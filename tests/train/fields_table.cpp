// The table of fields.hpp: one entry for each field.
#include "fields.hpp"

namespace capstan::testing {

namespace {

using Kind = Proof::Kind;

std::vector<Proof> table;

void changes(const char* field, const char* value, Overrides base = {}, View view = View::run) {
  table.push_back({Kind::changes, field, value, std::move(base), view, {}, {}});
}
void refused(const char* field, const char* value, Overrides base = {}) {
  table.push_back({Kind::refused, field, value, std::move(base), View::run, {}, {}});
}
void idle(const char* field, const char* value, Overrides when, Overrides base = {}) {
  table.push_back({Kind::idle, field, value, std::move(base), View::run, {}, std::move(when)});
}
void ruled(const char* field, const char* value, const char* rule, Overrides base = {}) {
  table.push_back({Kind::ruled, field, value, std::move(base), View::run, rule, {}});
}
void warned(const char* field, const char* value, const char* rule, Overrides base = {}) {
  table.push_back({Kind::warned, field, value, std::move(base), View::run, rule, {}});
}

Overrides with(Overrides base, const Overrides& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

void experts() {
  changes("model.num_moe_experts", "4");
  const Overrides on = {"model.num_moe_experts=4"};
  for (const auto& [field, value] : {std::pair("moe_layer_freq", "2"),
                                     {"moe_first_dense_layers", "1"},
                                     {"moe_ffn_hidden_size", "24"},
                                     {"moe_router_topk", "3"},
                                     {"moe_router_score_function", "sigmoid"},
                                     {"moe_router_pre_softmax", "true"},
                                     {"moe_router_topk_scaling_factor", "2.0"},
                                     {"moe_z_loss_coeff", "0.1"},
                                     {"moe_expert_capacity_factor", "0.5"},
                                     {"moe_shared_expert_intermediate_size", "24"}})
    changes((std::string("model.") + field).c_str(), value, on);
  const Overrides two = with(on, {"model.moe_router_load_balancing_type=[aux_loss, seq_aux_loss]",
                                  "model.moe_aux_loss_coeff=[0.3, 0.2]"});
  changes("model.moe_router_load_balancing_type", "[aux_loss, global_aux_loss]", two);
  changes("model.moe_aux_loss_coeff", "[0.3, 0.4]", two);
  changes("model.moe_pad_expert_input_to_capacity", "true",
          with(on, {"model.moe_expert_capacity_factor=2.0"}), View::memory);
  changes("model.moe_token_drop_policy", "position", with(on, {"model.moe_expert_capacity_factor=0.5"}));
  changes("model.moe_shared_expert_gate", "true", with(on, {"model.moe_shared_expert_intermediate_size=24"}));
  const Overrides groups = {"model.num_moe_experts=8", "model.moe_router_num_groups=4",
                            "model.moe_router_group_topk=1"};
  changes("model.moe_router_num_groups", "2", groups);
  changes("model.moe_router_group_topk", "2", groups);
  changes("model.moe_router_group_score_topk", "1", groups);
  changes("model.moe_input_jitter_eps", "0.1", on);
  changes("model.moe_router_dtype", "fp64", on);
  for (const char* field : {"model.moe_grouped_gemm", "model.moe_permute_fusion"})
    refused(field, "false", on);
  const Overrides sigmoid = with(on, {"model.moe_router_score_function=sigmoid"});
  changes("model.moe_router_enable_expert_bias", "true", sigmoid, View::model);
  changes("model.moe_router_bias_update_rate", "0.5",
          with(sigmoid, {"model.moe_router_enable_expert_bias=true"}));
  const Overrides exchanged = with(on, {"dist.world_size=2", "dist.ep=2"});
  changes("model.moe_token_dispatcher_type", "allgather", exchanged, View::memory);
  changes("model.moe_shared_expert_overlap", "true",
          with(exchanged, {"model.moe_shared_expert_intermediate_size=24"}), View::memory);
  changes("dist.expert_model_parallel_size", "2", with(on, {"dist.world_size=2"}), View::memory);
  changes("dist.expert_tensor_parallel_size", "2",
          with(on, {"dist.world_size=2", "dist.tp=2", "dist.sp=true", "dist.expert_tensor_parallel_size=1"}),
          View::memory);
  ruled("dist.expert_data_parallel_size", "2", "expert_data_parallel_size_agrees", on);
}

void model() {
  changes("model.num_layers", "3");
  changes("model.hidden_size", "48");
  changes("model.num_attention_heads", "2");
  changes("model.num_query_groups", "4");
  changes("model.kv_channels", "16");
  changes("model.ffn_hidden_size", "48");
  changes("model.seq_length", "12");
  changes("model.max_position_embeddings", "32", {"model.position_embedding_type=learned_absolute"},
          View::model);
  changes("model.vocab_size", "60");
  changes("model.make_vocab_size_divisible_by", "128", {}, View::model);
  changes("model.padded_vocab_size", "128", {}, View::model);

  changes("model.position_embedding_type", "none");
  changes("model.rotary_base", "50");
  changes("model.rotary_percent", "0.5");
  changes("model.rotary_interleaved", "true");
  const Overrides scaled = {"model.rope_scaling=true", "model.rope_scaling_factor=4",
                            "model.rope_scaling_original_max_position_embeddings=16"};
  changes("model.rope_scaling", "true");
  changes("model.rope_scaling_type", "yarn", scaled);
  changes("model.rope_scaling_factor", "8", scaled);
  changes("model.rope_scaling_low_freq_factor", "2", scaled);
  changes("model.rope_scaling_high_freq_factor", "3", scaled);
  changes("model.rope_scaling_original_max_position_embeddings", "32", scaled);
  const Overrides yarn = with(
      scaled, {"model.rope_scaling_type=yarn", "model.rope_scaling_original_max_position_embeddings=1000"});
  changes("model.rope_scaling_beta_fast", "2", yarn);
  changes("model.rope_scaling_beta_slow", "0.1", yarn);
  changes("model.rope_scaling_truncate", "false", yarn);
  changes("model.rope_scaling_mscale", "1.0", with(yarn, {"model.rope_scaling_mscale_all_dim=0.5"}));
  // Of the softmax scale of latent attention.
  changes("model.rope_scaling_mscale_all_dim", "0.5",
          with(yarn, {"model.multi_latent_attention=true", "model.num_query_groups=4"}));
  changes("model.rope_scaling_attention_factor", "1.5", yarn);
  const Overrides longrope =
      with(scaled, {"model.rope_scaling_type=longrope", "model.rope_scaling_short_factors=[1,1,1,1]",
                    "model.rope_scaling_long_factors=[1,1,1,1]"});
  changes("model.rope_scaling_short_factors", "[1,2,3,4]", longrope);
  changes("model.rope_scaling_long_factors", "[1,2,3,4]",
          with(longrope, {"model.rope_scaling_original_max_position_embeddings=8"}));

  changes("model.architecture", "gpt_neox");
  changes("model.normalization", "LayerNorm");
  changes("model.norm_placement", "output");
  changes("model.layernorm_epsilon", "0.1");
  changes("model.layernorm_zero_centered_gamma", "true", {}, View::model);
  changes("model.gated_linear_unit", "false");
  changes("model.activation_func", "gelu");
  changes("model.activation_func_clamp_value", "0.01");
  changes("model.glu_linear_offset", "1");
  changes("model.add_bias_linear", "true");
  changes("model.add_qkv_bias", "true");
  changes("model.add_attention_output_bias", "true");
  changes("model.add_mlp_bias", "true");
  changes("model.qk_layernorm", "true");
  changes("model.qk_layernorm_across_heads", "true", {"model.qk_layernorm=true"});
  changes("model.embedding_multiplier", "4");
  changes("model.apply_residual_connection_post_layernorm", "true", {"model.normalization=LayerNorm"});
  refused("model.fp32_residual_connection", "true", {"mixed_precision.params_dtype=bf16"});
  changes("model.share_embeddings_and_output_weights", "false");
  changes("model.softmax_scale", "0.01");
  changes("model.attn_logit_softcapping", "0.01");
  changes("model.final_logit_softcapping", "1");
  changes("model.softmax_type", "learnable");
  refused("model.attention_softmax_in_fp32", "false");
  refused("model.cross_entropy_loss_fusion", "false");
  changes("model.window_size", "4");
  changes("model.window_attn_skip_freq", "2", {"model.window_size=4"});
  changes("model.hidden_dropout", "0.1");
  changes("model.attention_dropout", "0.1");
  changes("model.init_method_std", "0.1");
  changes("model.embedding_init_method_std", "0.1");

  const Overrides deep = {"model.num_layers=4", "model.recompute_granularity=full"};
  changes("model.recompute_granularity", "full", {}, View::memory);
  changes("model.recompute_method", "block", with(deep, {"model.recompute_num_layers=1"}), View::memory);
  changes("model.recompute_num_layers", "4", deep, View::memory);
  changes("model.recompute_modules", "[mlp]", {"model.recompute_granularity=selective"}, View::memory);
  refused("model.distribute_saved_activations", "true",
          {"model.recompute_granularity=full", "dist.world_size=2", "dist.tp=2"});
  const Overrides offload = {"model.num_layers=4", "model.cpu_offloading_num_layers=1",
                             "train.device=checked"};
  changes("model.cpu_offloading", "true", offload, View::memory);
  changes("model.cpu_offloading_num_layers", "2", with(offload, {"model.cpu_offloading=true"}), View::memory);
  changes("model.cuda_graph_impl", "local", {"train.device=simulated"});
  changes("model.cuda_graph_warmup_steps", "2", {"train.device=simulated", "model.cuda_graph_impl=local"});
}

void multi_token_prediction() {
  changes("model.mtp_num_layers", "1");
  changes("model.mtp_loss_scaling_factor", "0.3", {"model.mtp_num_layers=1"});
}

void latent_attention() {
  changes("model.multi_latent_attention", "true", {"model.num_query_groups=4"});
  const Overrides latent = {"model.multi_latent_attention=true", "model.num_query_groups=4"};
  changes("model.q_lora_rank", "8", latent);
  changes("model.kv_lora_rank", "8", latent);
  changes("model.qk_head_dim", "8", latent);
  changes("model.qk_pos_emb_head_dim", "8", latent);
  changes("model.v_head_dim", "8", latent);
  changes("model.latent_layernorm_epsilon", "0.1", with(latent, {"model.qk_layernorm=true"}));
}

void precision() {
  changes("mixed_precision.params_dtype", "bf16");
  ruled("mixed_precision.pipeline_dtype", "bf16", "stages_exchange_the_residual");
  changes("mixed_precision.grad_reduce_in_fp32", "false",
          {"mixed_precision.params_dtype=bf16", "dist.world_size=2"}, View::memory);
  changes("mixed_precision.tf32", "true", {"train.device=simulated"});
  // Gradients overflow at a scale of 2^21 and not at 2^16.
  const Overrides fp16 = {"mixed_precision.params_dtype=fp16"};
  const Overrides overflow = with(fp16, {"mixed_precision.initial_loss_scale=2097152"});
  changes("mixed_precision.loss_scale", "1024", fp16);
  changes("mixed_precision.initial_loss_scale", "1024", fp16);
  changes("mixed_precision.min_loss_scale", "2097152", overflow);
  changes("mixed_precision.hysteresis", "1", overflow);
  changes("mixed_precision.loss_scale_window", "1",
          with(fp16, {"mixed_precision.initial_loss_scale=262144"}));
  const Overrides fp8 = {"mixed_precision.fp8=hybrid", "mixed_precision.params_dtype=bf16"};
  changes("mixed_precision.fp8", "hybrid", {"mixed_precision.params_dtype=bf16"});
  changes("mixed_precision.fp8_recipe", "mxfp8", fp8);
  const Overrides delayed = {"mixed_precision.fp8=hybrid", "mixed_precision.params_dtype=bf16",
                             "mixed_precision.fp8_recipe=delayed"};
  changes("mixed_precision.fp8_margin", "1", delayed);
  const Overrides largest = {"mixed_precision.fp8=hybrid", "mixed_precision.params_dtype=bf16",
                             "mixed_precision.fp8_recipe=delayed",
                             "mixed_precision.fp8_amax_compute_algo=max"};
  changes("mixed_precision.fp8_amax_history_len", "16", largest);
  changes("mixed_precision.fp8_amax_compute_algo", "max",
          {"mixed_precision.fp8=hybrid", "mixed_precision.params_dtype=bf16",
           "mixed_precision.fp8_recipe=delayed", "mixed_precision.fp8_amax_history_len=16"});
  changes("mixed_precision.fp8_wgrad", "false", fp8);
  changes("mixed_precision.fp8_param_gather", "true",
          with(fp8, {"dist.world_size=2", "ddp.data_parallel_sharding_strategy=optim"}), View::memory);
  changes("mixed_precision.fp4", "e2m1", {"mixed_precision.params_dtype=bf16"});
  ruled("mixed_precision.fp4_recipe", "other", "C0207");  // one value so far
  ruled("mixed_precision.fp4_param_gather", "true", "block_scales_exclude_param_gather",
        {"mixed_precision.fp4=e2m1", "mixed_precision.params_dtype=bf16", "dist.world_size=2",
         "ddp.data_parallel_sharding_strategy=optim"});
  changes("mixed_precision.first_last_layers_bf16", "true", fp8);
  const Overrides edges = {"mixed_precision.fp8=hybrid", "mixed_precision.params_dtype=bf16",
                           "mixed_precision.first_last_layers_bf16=true"};
  changes("mixed_precision.num_layers_at_start_in_bf16", "0", edges);
  changes("mixed_precision.num_layers_at_end_in_bf16", "0", edges);
}

void layout() {
  const Overrides two = {"dist.world_size=2"};
  const Overrides stages = {"dist.world_size=2", "dist.pp=2", "model.num_layers=4"};
  const Overrides chunks = {
      "dist.world_size=2",        "dist.pp=2", "dist.vpp=2", "model.num_layers=4", "train.micro_batch_size=1",
      "train.global_batch_size=4"};
  changes("dist.world_size", "2", {}, View::wiring);
  changes("dist.tensor_model_parallel_size", "2", two, View::memory);
  changes("dist.pipeline_model_parallel_size", "2", two, View::memory);
  changes("dist.context_parallel_size", "2", two, View::memory);
  ruled("dist.data_parallel_size", "2", "data_parallel_size_agrees");
  changes("dist.virtual_pipeline_model_parallel_size", "2", stages, View::wiring);
  changes("dist.num_layers_per_virtual_pipeline_stage", "1", stages, View::wiring);
  changes("dist.pipeline_model_parallel_layout", "\"Et|tttL\"", stages, View::wiring);
  changes("dist.num_layers_in_first_pipeline_stage", "1", stages, View::wiring);
  changes("dist.num_layers_in_last_pipeline_stage", "1", stages, View::wiring);
  ruled("dist.account_for_embedding_in_pipeline_split", "true", "stages_divide_layers", stages);
  ruled("dist.account_for_loss_in_pipeline_split", "true", "stages_divide_layers", stages);
  changes("dist.microbatch_group_size_per_vp_stage", "4", chunks, View::wiring);
  changes("dist.pipeline_schedule", "gpipe", stages, View::wiring);
  warned("dist.variable_seq_lengths", "true", "p2p_options_without_effect", stages);
  changes("dist.sequence_parallel", "true", {"dist.world_size=2", "dist.tp=2"}, View::memory);
  changes("dist.cp_comm_type", "a2a", {"dist.world_size=2", "dist.cp=2"}, View::memory);
  changes("dist.hierarchical_context_parallel_sizes", "[4,1]",
          {"dist.world_size=4", "dist.cp=4", "model.num_query_groups=4", "dist.cp_comm_type=a2a+p2p",
           "dist.hierarchical_context_parallel_sizes=[2,2]", "model.seq_length=16"},
          View::wiring);
  changes("dist.use_tp_pp_dp_mapping", "true", {"dist.world_size=4", "dist.pp=2"}, View::wiring);
  // On the CPU it is an error of the run.
  changes("dist.distributed_backend", "nccl", {"train.device=auto"});

  changes("ddp.data_parallel_sharding_strategy", "optim", two, View::memory);
  const Overrides groups = {"dist.world_size=4", "ddp.sharding=optim",
                            "ddp.num_distributed_optimizer_instances=2", "train.micro_batch_size=1"};
  changes("ddp.outer_dp_sharding_strategy", "optim", groups, View::memory);
  changes("ddp.num_distributed_optimizer_instances", "2",
          {"dist.world_size=4", "ddp.sharding=optim", "train.micro_batch_size=1"}, View::memory);
  changes("ddp.overlap_grad_reduce", "true", two, View::wiring);
  changes("ddp.overlap_param_gather", "true",
          {"dist.world_size=2", "ddp.sharding=optim", "ddp.overlap_grad_reduce=true"}, View::wiring);
  refused("ddp.align_param_gather", "true",
          {"dist.world_size=2", "ddp.sharding=optim", "ddp.overlap_grad_reduce=true",
           "ddp.overlap_param_gather=true"});
  changes("ddp.bucket_size", "1000", two, View::wiring);

  const Overrides tensor = {"dist.world_size=2", "dist.tp=2", "dist.sequence_parallel=true"};
  changes("comm_overlap.tp_comm_overlap", "true", tensor, View::wiring);
  changes(
      "comm_overlap.tp_comm_num_splits", "2",
      {"dist.world_size=2", "dist.tp=2", "dist.sequence_parallel=true", "comm_overlap.tp_comm_overlap=true"},
      View::wiring);
  changes("comm_overlap.overlap_p2p_comm", "false",
          {"dist.world_size=4", "dist.pp=4", "dist.vpp=2", "model.num_layers=8", "train.micro_batch_size=1"},
          View::wiring);
  warned("comm_overlap.batch_p2p_comm", "false", "p2p_options_without_effect", stages);
  refused("comm_overlap.overlap_param_gather_with_optimizer_step", "true",
          {"dist.world_size=4", "dist.pp=2", "dist.vpp=2", "model.num_layers=4", "train.micro_batch_size=1",
           "ddp.sharding=optim", "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"});
  refused("comm_overlap.defer_embedding_wgrad_compute", "true", stages);
  idle("comm_overlap.wgrad_deferral_limit", "1", {"comm_overlap.defer_embedding_wgrad_compute=true"}, stages);
  refused("comm_overlap.overlap_moe_expert_parallel_comm", "true",
          {"dist.world_size=2", "model.num_moe_experts=4", "dist.ep=2",
           "model.moe_token_dispatcher_type=alltoall", "mixed_precision.params_dtype=bf16"});
  refused("comm_overlap.delay_wgrad_compute", "true");
}

void training() {
  changes("train.micro_batch_size", "1", {}, View::memory);
  changes("train.global_batch_size", "8");
  changes("train.rampup_batch_size", "[2,2,8]", {"train.train_iters=null", "train.train_samples=24"});
  table.push_back({Kind::allows,
                   "train.decrease_batch_size_if_needed",
                   "true",
                   {"train.micro_batch_size=2", "train.global_batch_size=5"},
                   View::run,
                   "global_batch_divisible",
                   {}});
  ruled("train.num_microbatches", "3", "micro_batches_agree");
  changes("train.train_iters", "3", {}, View::files);
  changes("train.train_samples", "12", {"train.train_iters=null", "train.train_samples=20"}, View::files);
  changes("train.exit_interval", "2", {}, View::files);
  changes("train.exit_duration_in_mins", "1e-9", {}, View::files);
  changes("train.exit_signal_handler", "false", {}, View::files);
  changes("train.device", "checked");
  changes("train.threads", "2");

  changes("optimizer.optimizer", "sgd");
  changes("optimizer.lr", "0.02");
  changes("optimizer.min_lr", "0.005");
  changes("optimizer.min_lr_ratio", "0.5");
  changes("optimizer.decoupled_lr", "0.02");
  changes("optimizer.decoupled_min_lr", "0.005", {"optimizer.decoupled_lr=0.02"});
  changes("optimizer.weight_decay", "0.3");
  changes("optimizer.decoupled_weight_decay", "false");
  changes("optimizer.apply_wd_to_qk_layernorm", "true", {"model.qk_layernorm=true"});
  changes("optimizer.adam_beta1", "0.5");
  changes("optimizer.adam_beta2", "0.5");
  changes("optimizer.adam_eps", "0.1");
  changes("optimizer.sgd_momentum", "0.5", {"optimizer.optimizer=sgd"});
  changes("optimizer.lion_beta1", "0.5", {"optimizer.optimizer=lion"});
  changes("optimizer.lion_beta2", "0.5", {"optimizer.optimizer=lion"});
  const Overrides muon = {"optimizer.optimizer=muon"};
  const Overrides simple = with(muon, {"optimizer.muon_coefficient_type=simple"});
  changes("optimizer.muon_momentum", "0.5", muon);
  changes("optimizer.muon_use_nesterov", "true", muon);
  changes("optimizer.muon_num_ns_steps", "3", simple);
  changes("optimizer.muon_coefficient_type", "simple", muon);
  changes("optimizer.muon_scale_mode", "unit_rms_norm", muon);
  changes("optimizer.muon_extra_scale_factor", "0.2", muon);
  changes("optimizer.muon_split_qkv", "false", muon);
  changes("optimizer.muon_tp_mode", "distributed", with(muon, {"dist.world_size=2", "dist.tp=2"}),
          View::memory);
  changes("optimizer.clip_grad", "0.01", {"optimizer.optimizer=sgd"});
  changes("optimizer.grad_norm_skip_threshold", "1e-6");
  warned("optimizer.use_precision_aware_optimizer", "true", "precision_aware_stores_below_fp32");
  const Overrides precision_aware = {"optimizer.use_precision_aware_optimizer=true"};
  changes("optimizer.main_grads_dtype", "bf16", with(precision_aware, {"mixed_precision=bf16_mixed"}));
  changes("optimizer.main_params_dtype", "bf16",
          with(precision_aware, {"mixed_precision=bf16_mixed", "optimizer.exp_avg_dtype=bf16",
                                 "optimizer.stochastic_rounding=true"}));
  changes("optimizer.exp_avg_dtype", "bf16", precision_aware);
  changes("optimizer.exp_avg_sq_dtype", "fp8", precision_aware);
  changes("optimizer.stochastic_rounding", "true", with(precision_aware, {"optimizer.exp_avg_dtype=bf16"}));
  const Overrides checked = {"train.device=checked"};
  changes("optimizer.optimizer_cpu_offload", "true", checked, View::memory);
  changes("optimizer.optimizer_offload_fraction", "0.5",
          with(checked, {"optimizer.optimizer_cpu_offload=true"}), View::memory);
  changes("optimizer.optimizer_offload_path", ".", with(checked, {"optimizer.optimizer_cpu_offload=true"}),
          View::memory);
  changes("optimizer.optimizer_offload_chunk_size", "4096",
          with(checked, {"optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_path=."}),
          View::memory);

  changes("scheduler.lr_decay_style", "linear");
  const Overrides wsd = {"scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=4"};
  changes("scheduler.lr_wsd_decay_style", "linear", wsd);
  changes("scheduler.lr_decay_iters", "4");
  const Overrides samples = {"train.train_iters=null", "train.train_samples=24"};
  changes("scheduler.lr_decay_samples", "16", samples);
  changes("scheduler.lr_wsd_decay_iters", "2", wsd);
  changes("scheduler.lr_wsd_decay_samples", "8",
          {"train.train_iters=null", "train.train_samples=24", "scheduler.lr_decay_style=WSD",
           "scheduler.lr_wsd_decay_samples=16"});
  changes("scheduler.lr_wsd_decay_fraction", "0.3",
          {"scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_fraction=0.6"});
  changes("scheduler.lr_warmup_fraction", "0.5");
  changes("scheduler.lr_warmup_iters", "3");
  changes("scheduler.lr_warmup_samples", "12", samples);
  changes("scheduler.lr_warmup_init", "0.001", {"scheduler.lr_warmup_iters=3"});
  const Overrides growing = {"scheduler.weight_decay_incr_style=linear", "scheduler.start_weight_decay=0.1",
                             "scheduler.end_weight_decay=0.4"};
  changes("scheduler.start_weight_decay", "0.3", growing);
  changes("scheduler.end_weight_decay", "0.9", growing);
  changes("scheduler.weight_decay_incr_style", "cosine", growing);
  changes("scheduler.override_opt_param_scheduler", "true", {"train.train_iters=12"}, View::resume);
  changes("scheduler.use_checkpoint_opt_param_scheduler", "true",
          {"train.train_iters=12", "scheduler.lr_decay_iters=12"}, View::resume);
}

void data_and_tokenizer() {
  const Overrides gpt = {"dataset.kind=gpt", "dataset.data_path=[one]", "dataset.split=\"80,10,10\"",
                         "tokenizer.tokenizer_type=byte", "model.vocab_size=257"};
  const Overrides blends = {"dataset.kind=gpt",
                            "dataset.train_blend={one: 1}",
                            "dataset.valid_blend={one: 1}",
                            "dataset.test_blend={one: 1}",
                            "validation.eval_interval=2",
                            "tokenizer.tokenizer_type=byte",
                            "model.vocab_size=257"};
  const Overrides sft = {"dataset.kind=sft",
                         "dataset.train_files=[one.jsonl]",
                         "dataset.split=\"60,20,20\"",
                         "tokenizer.tokenizer_type=byte",
                         "tokenizer.chat_template=chatml",
                         "model.vocab_size=257",
                         "model.seq_length=100"};
  const Overrides files = {"dataset.kind=sft",
                           "dataset.train_files=[one.jsonl]",
                           "dataset.valid_files=[one.jsonl]",
                           "dataset.test_files=[one.jsonl]",
                           "validation.eval_interval=2",
                           "tokenizer.tokenizer_type=byte",
                           "tokenizer.chat_template=chatml",
                           "model.vocab_size=257",
                           "model.seq_length=100"};
  ruled("dataset.kind", "gpt", "one_source_of_data");
  changes("dataset.data_path", "[two]", gpt, View::data);
  changes("dataset.blend", "{one: 0.5, two: 0.5}",
          {"dataset.kind=gpt", "dataset.blend={one: 0.1, two: 0.9}", "dataset.split=\"80,10,10\"",
           "model.vocab_size=257"},
          View::data);
  changes("dataset.train_blend", "{two: 1}", blends, View::data);
  changes("dataset.valid_blend", "{two: 1}", blends, View::data);
  changes("dataset.test_blend", "{two: 1}", blends, View::data);
  changes("dataset.split", "\"50,40,10\"", gpt, View::data);
  changes("dataset.sample_order", "megatron", gpt, View::data);
  changes("dataset.path_to_cache", "saves", gpt, View::files);
  Overrides passes = gpt;
  passes.insert(passes.end(), {"train.train_iters=null", "train.epochs=0.5"});
  changes("train.epochs", "1", passes, View::files);
  changes("dataset.reset_position_ids", "true", gpt, View::data);
  changes("dataset.reset_attention_mask", "true", gpt, View::data);
  changes("dataset.eod_mask_loss", "true", gpt, View::data);
  changes("dataset.train_files", "[two.jsonl]", sft, View::data);
  changes("dataset.valid_files", "[two.jsonl]", files, View::data);
  changes("dataset.test_files", "[two.jsonl]", files, View::data);
  changes("dataset.format", "messages",
          {"dataset.kind=sft", "dataset.train_files=[one.jsonl]", "dataset.format=text",
           "dataset.loss_mode=all", "tokenizer.tokenizer_type=byte", "tokenizer.chat_template=chatml",
           "model.vocab_size=257", "model.seq_length=100"},
          View::data);
  changes("dataset.loss_mode", "all", sft, View::data);
  changes("dataset.packing", "false", sft, View::data);
  changes("dataset.too_long", "drop", sft, View::data);
  changes("dataset.max_train_samples", "2", sft, View::data);
  Overrides damaged = sft;
  damaged.push_back("dataset.train_files=[damaged.jsonl]");
  changes("dataset.on_bad_line", "skip", damaged, View::files);
  changes("dataset.random_seed", "7", {}, View::data);
  changes("dataset.num_workers", "0", {}, View::data);

  const Overrides pair = {"tokenizer.tokenizer_type=gpt2_bpe", "tokenizer.vocab_file=vocab.json",
                          "tokenizer.merge_file=merges.txt", "model.vocab_size=300"};
  changes("tokenizer.tokenizer_type", "byte", {"model.vocab_size=300"}, View::tokens);
  changes("tokenizer.tokenizer_model", "other.json",
          {"tokenizer.tokenizer_type=huggingface", "tokenizer.tokenizer_model=tokenizer.json",
           "model.vocab_size=300"},
          View::tokens);
  changes("tokenizer.vocab_file", "vocab2.json", pair, View::tokens);
  changes("tokenizer.merge_file", "merges2.txt", pair, View::tokens);
  changes("tokenizer.pre_tokenizer", "llama3", pair, View::tokens);
  changes("tokenizer.eod_token", "b", pair, View::tokens);
  changes("tokenizer.chat_template", "chatml",
          {"tokenizer.tokenizer_type=byte", "model.vocab_size=300", "tokenizer.chat_template=llama3"},
          View::tokens);
}

void run_records() {
  table.push_back({Kind::changes, "name", "other", {}, View::files, {}, {}});
  table.push_back({Kind::changes, "description", "\"what it is for\"", {}, View::shown, {}, {}});
  changes("validation.eval_interval", "2", {}, View::files);
  const Overrides evaluating = {"validation.eval_interval=2", "validation.eval_iters=1"};
  changes("validation.eval_iters", "2", evaluating, View::files);
  changes("validation.eval_global_batch_size", "8", evaluating, View::files);
  changes("validation.eval_micro_batch_size", "32",
          {"validation.eval_interval=2", "validation.eval_iters=1", "validation.eval_global_batch_size=32",
           "validation.eval_micro_batch_size=2"},
          View::memory);

  changes("checkpoint.save", "saves", {}, View::files);
  changes("checkpoint.load", "begun", {}, View::files);
  changes("checkpoint.pretrained_checkpoint", "begun", {}, View::files);
  changes("checkpoint.ckpt_step", "4", {"checkpoint.load=begun"}, View::files);
  changes("checkpoint.save_interval", "2", {}, View::files);
  changes("checkpoint.save_retain_interval", "2",
          {"checkpoint.save_interval=2", "checkpoint.most_recent_k=1"}, View::files);
  changes("checkpoint.most_recent_k", "1", {"checkpoint.save_interval=2"}, View::files);
  changes("checkpoint.save_optim", "false", {}, View::files);
  changes("checkpoint.load_optim", "false", {"checkpoint.load=begun", "checkpoint.ckpt_step=4"}, View::files);
  changes("checkpoint.async_save", "true", {"checkpoint.save_interval=2"}, View::memory);
  changes("checkpoint.save_tokenizer_assets", "false",
          {"dataset.kind=gpt", "dataset.data_path=[small]", "dataset.split=\"80,10,10\"",
           "tokenizer.tokenizer_type=huggingface", "tokenizer.tokenizer_model=tokenizer.json",
           "model.vocab_size=16"},
          View::files);

  changes("logger.log_interval", "2", {}, View::files);
  changes("logger.tensorboard", "false", {}, View::files);
  changes("logger.tensorboard_dir", "events", {}, View::files);
  changes("logger.tensorboard_log_interval", "2", {}, View::files);
  changes("logger.log_params_norm", "true", {}, View::files);
  changes("logger.log_num_zeros_in_grad", "true", {}, View::files);

  const Overrides traced = {"profiling.trace=true", "profiling.profile_step_start=2",
                            "profiling.profile_step_end=4"};
  changes("profiling.trace", "true", {"profiling.profile_step_start=2", "profiling.profile_step_end=4"},
          View::files);
  changes("profiling.profile_step_start", "3", traced, View::files);
  changes("profiling.profile_step_end", "5", traced, View::files);
  changes("profiling.profile_ranks", "[]", traced, View::files);
  changes("profiling.record_shapes", "false", traced, View::files);
  changes("profiling.trace_dir", "traces", traced, View::files);

  changes("rng.seed", "7");
  table.push_back({Kind::elsewhere,
                   "resilience.timeout",
                   "resilience.timeout decides whether",
                   {},
                   View::run,
                   "tests/cli/ranks.cpp",
                   {}});
  changes("resilience.memory_limit", "1KiB", {}, View::files);
  changes("resilience.memory_limit_host", "1KiB", {}, View::files);
  changes("resilience.check_for_nan", "false",
          {"optimizer.lr=100", "optimizer.clip_grad=0", "optimizer.optimizer=sgd", "optimizer.min_lr=99",
           "optimizer.weight_decay=1e6"});
  // Decay by lr * weight_decay = 3 doubles the weights in every step: the losses grow by themselves, whatever
  // the rounding of the machine.
  const Overrides growing = {"optimizer.optimizer=sgd", "optimizer.sgd_momentum=0",   "optimizer.lr=0.01",
                             "optimizer.min_lr=0.009",  "optimizer.weight_decay=300", "train.train_iters=12"};
  const Overrides jumping = {"optimizer.lr=0.5", "resilience.spike_window=2", "train.train_iters=12"};
  const auto with = [&](Overrides more) {
    more.insert(more.begin(), jumping.begin(), jumping.end());
    return more;
  };
  table.push_back({Kind::changes,
                   "resilience.loss_spike_action",
                   "warn",
                   growing,
                   View::run,
                   {},
                   {"resilience.loss_spike_factor=1.01", "resilience.spike_window=2"}});
  Overrides warned_of = growing;
  warned_of.insert(warned_of.end(), {"resilience.loss_spike_action=warn", "resilience.spike_window=2"});
  changes("resilience.loss_spike_factor", "1.01", warned_of);
  table.push_back({Kind::changes,
                   "resilience.grad_norm_spike_action",
                   "skip",
                   {"optimizer.lr=0.5", "train.train_iters=12"},
                   View::run,
                   {},
                   {"resilience.grad_norm_spike_factor=1.01", "resilience.spike_window=2"}});
  changes("resilience.grad_norm_spike_factor", "1.01", with({"resilience.grad_norm_spike_action=skip"}));
  changes("resilience.spike_window", "1",
          with({"resilience.grad_norm_spike_action=warn", "resilience.grad_norm_spike_factor=1.01"}));
  changes("resilience.max_rewinds", "1",
          with({"resilience.grad_norm_spike_action=rewind", "resilience.grad_norm_spike_factor=1.01",
                "checkpoint.save_interval=2"}),
          View::files);
  changes("resilience.rerun_mode", "validate_results",
          with({"resilience.grad_norm_spike_action=warn", "resilience.grad_norm_spike_factor=1.01"}));
}

void adapters() {
  const Overrides lora = {"peft.random_base=true", "peft.dim=4"};
  changes("peft.scheme", "dora", lora);
  changes("peft.target_modules", "[linear_fc1]", lora);
  changes("peft.exclude_modules", "[linear_fc1]", lora);
  changes("peft.dim", "8", lora);
  changes("peft.alpha", "8", lora);
  changes("peft.use_rslora", "true", lora);
  changes("peft.lora_plus_ratio", "16", lora);
  changes("peft.dropout", "0.3", lora);
  refused("peft.dropout_position", "post", lora);
  changes("peft.lora_A_init", "normal", lora);
  changes("peft.lora_B_init", "normal", lora);
  ruled("peft.lora_dtype", "bf16", "adapters_have_the_models_format", lora);
  table.push_back(
      {Kind::allows, "peft.random_base", "true", {"peft.dim=4"}, View::run, "adapters_need_a_model", {}});
  const Overrides nf4 = {"peft.random_base=true", "peft.dim=4", "peft.base_quantization=nf4"};
  changes("peft.base_quantization", "nf4", lora);
  changes("peft.quantization_block", "32", nf4);
  changes("peft.quantization_double", "false", nf4);
  changes("peft.adapter", "adapted", lora, View::files);
}

}  // namespace

const std::vector<Proof>& proofs() {
  if (table.empty()) {
    model();
    experts();
    latent_attention();
    multi_token_prediction();
    precision();
    layout();
    training();
    data_and_tokenizer();
    run_records();
    adapters();
  }
  return table;
}

}  // namespace capstan::testing
