// Values that follow from others where a recipe leaves them open. Each function fills one field and leaves it
// alone when its inputs do not fit; the rules then say why.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/checked.hpp"
#include "base/text.hpp"
#include "config/sections/architecture.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "config/sections/rotary.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {

bool scales_as_yarn(const ModelConfig& m) {
  return m.position_embedding_type == PositionEmbedding::rope && m.rope_scaling &&
         m.rope_scaling_type == RopeScaling::yarn;
}

void derive_model(Schema& s) {
  s.derive<Config>("model.architecture",
                   "deepseek where model.multi_latent_attention is true, else moe where "
                   "model.num_moe_experts is set, else gpt",
                   [](Config& c) { c.model.architecture = derived_architecture(c.model); });
  s.derive<Config>("model.kv_channels",
                   "model.hidden_size / model.num_attention_heads; with model.multi_latent_attention "
                   "model.qk_head_dim + model.qk_pos_emb_head_dim",
                   [](Config& c) {
                     const auto& m = c.model;
                     if (m.multi_latent_attention)
                       c.model.kv_channels = m.qk_head_dim + m.qk_pos_emb_head_dim;
                     else if (m.num_attention_heads > 0 && m.hidden_size % m.num_attention_heads == 0)
                       c.model.kv_channels = m.hidden_size / m.num_attention_heads;
                   });
  s.derive<Config>("model.num_query_groups", "model.num_attention_heads",
                   [](Config& c) { c.model.num_query_groups = c.model.num_attention_heads; });
  s.derive<Config>("model.ffn_hidden_size",
                   "4 * model.hidden_size; with model.gated_linear_unit 8/3 of it, down to a multiple of 64",
                   [](Config& c) {
                     const int64_t h = c.model.hidden_size;
                     const int64_t gated = 8 * h / 3 / 64 * 64;
                     c.model.ffn_hidden_size = c.model.gated_linear_unit && gated > 0 ? gated : 4 * h;
                   });
  s.derive<Config>("model.max_position_embeddings", "model.seq_length",
                   [](Config& c) { c.model.max_position_embeddings = c.model.seq_length; });
  s.derive<Config>(
      "model.padded_vocab_size",
      "model.vocab_size rounded up to a multiple of model.make_vocab_size_divisible_by", [](Config& c) {
        if (c.model.make_vocab_size_divisible_by > 0)
          c.model.padded_vocab_size = round_up(c.model.vocab_size, c.model.make_vocab_size_divisible_by);
      });
  s.derive<Config>("model.softmax_scale",
                   "1 / sqrt(model.kv_channels); with model.multi_latent_attention and "
                   "model.rope_scaling_mscale_all_dim m times mscale(model.rope_scaling_factor, m) squared",
                   [](Config& c) {
                     auto& m = c.model;
                     if (!m.kv_channels) return;
                     m.softmax_scale = 1.0 / std::sqrt(static_cast<double>(*m.kv_channels));
                     if (!m.multi_latent_attention || !scales_as_yarn(m) || !m.rope_scaling_mscale_all_dim)
                       return;
                     const double factor = yarn_mscale(m.rope_scaling_factor, *m.rope_scaling_mscale_all_dim);
                     *m.softmax_scale *= factor * factor;
                   });
  s.derive<Config>(
      "model.rope_scaling_attention_factor",
      "1 up to a model.rope_scaling_factor of 1; yarn: mscale(factor, 1) = 0.1 ln(factor) + 1, or "
      "mscale(factor, model.rope_scaling_mscale) / mscale(factor, model.rope_scaling_mscale_all_dim); "
      "longrope: sqrt(1 + ln(factor) / ln(model.rope_scaling_original_max_position_embeddings))",
      [](Config& c) {
        auto& m = c.model;
        if (m.position_embedding_type != PositionEmbedding::rope || !m.rope_scaling) return;
        const double longer = std::log(std::max(1.0, m.rope_scaling_factor));
        const auto original = static_cast<double>(m.rope_scaling_original_max_position_embeddings);
        if (m.rope_scaling_type == RopeScaling::yarn && m.rope_scaling_mscale &&
            m.rope_scaling_mscale_all_dim)
          m.rope_scaling_attention_factor =
              yarn_mscale(m.rope_scaling_factor, *m.rope_scaling_mscale) /
              yarn_mscale(m.rope_scaling_factor, *m.rope_scaling_mscale_all_dim);
        else if (m.rope_scaling_type == RopeScaling::yarn)
          m.rope_scaling_attention_factor = yarn_mscale(m.rope_scaling_factor, 1);
        else if (m.rope_scaling_type == RopeScaling::longrope)
          m.rope_scaling_attention_factor = original > 1 ? std::sqrt(1 + longer / std::log(original)) : 1;
      });
  s.derive<Config>("model.add_attention_output_bias", "model.add_bias_linear",
                   [](Config& c) { c.model.add_attention_output_bias = c.model.add_bias_linear; });
  s.derive<Config>("model.add_mlp_bias", "model.add_bias_linear",
                   [](Config& c) { c.model.add_mlp_bias = c.model.add_bias_linear; });
  s.derive<Config>("model.embedding_init_method_std", "model.init_method_std",
                   [](Config& c) { c.model.embedding_init_method_std = c.model.init_method_std; });
  s.derive<Config>("model.latent_layernorm_epsilon",
                   "model.layernorm_epsilon where model.multi_latent_attention is true", [](Config& c) {
                     if (c.model.multi_latent_attention)
                       c.model.latent_layernorm_epsilon = c.model.layernorm_epsilon;
                   });
  s.derive<Config>("model.recompute_method", "uniform where model.recompute_granularity is full",
                   [](Config& c) {
                     if (c.model.recompute_granularity == RecomputeGranularity::full)
                       c.model.recompute_method = RecomputeMethod::uniform;
                   });
  s.derive<Config>("model.recompute_num_layers", "1 where model.recompute_granularity is full",
                   [](Config& c) {
                     if (c.model.recompute_granularity == RecomputeGranularity::full)
                       c.model.recompute_num_layers = 1;
                   });
  s.derive<Config>("model.recompute_modules", "[core_attn] where model.recompute_granularity is selective",
                   [](Config& c) {
                     if (c.model.recompute_granularity == RecomputeGranularity::selective)
                       c.model.recompute_modules = {RecomputeModule::core_attn};
                   });
  s.derive<Config>("model.moe_ffn_hidden_size", "model.ffn_hidden_size where model.num_moe_experts is set",
                   [](Config& c) {
                     if (c.model.num_moe_experts) c.model.moe_ffn_hidden_size = c.model.ffn_hidden_size;
                   });
  s.derive<Config>("model.moe_router_group_score_topk",
                   "model.moe_router_topk / model.moe_router_group_topk, at least 1, where "
                   "model.moe_router_num_groups is set",
                   [](Config& c) {
                     auto& m = c.model;
                     if (m.num_moe_experts && m.moe_router_num_groups && m.moe_router_group_topk)
                       m.moe_router_group_score_topk =
                           std::max<int64_t>(1, m.moe_router_topk / *m.moe_router_group_topk);
                   });
}

void derive_world(Schema& s) {
  s.derive<Config>("dist.expert_tensor_parallel_size",
                   "dist.tensor_model_parallel_size where model.num_moe_experts is set", [](Config& c) {
                     if (c.model.num_moe_experts)
                       c.dist.expert_tensor_parallel_size = c.dist.tensor_model_parallel_size;
                   });
  s.derive<Config>("dist.data_parallel_size",
                   "dist.world_size / (dist.tensor_model_parallel_size * dist.pipeline_model_parallel_size * "
                   "dist.context_parallel_size)",
                   [](Config& c) {
                     const auto& d = c.dist;
                     auto product = try_mul(d.tensor_model_parallel_size, d.pipeline_model_parallel_size);
                     if (product) product = try_mul(*product, d.context_parallel_size);
                     if (product && *product > 0 && d.world_size % *product == 0)
                       c.dist.data_parallel_size = d.world_size / *product;
                   });
  s.derive<Config>("dist.expert_data_parallel_size",
                   "dist.world_size / (dist.expert_tensor_parallel_size * dist.expert_model_parallel_size * "
                   "dist.pipeline_model_parallel_size) where model.num_moe_experts is set",
                   [](Config& c) {
                     const auto& d = c.dist;
                     if (!c.model.num_moe_experts || !d.expert_tensor_parallel_size) return;
                     auto product = try_mul(*d.expert_tensor_parallel_size, d.expert_model_parallel_size);
                     if (product) product = try_mul(*product, d.pipeline_model_parallel_size);
                     if (product && *product > 0 && d.world_size % *product == 0)
                       c.dist.expert_data_parallel_size = d.world_size / *product;
                   });
}

// At most one of the number of virtual stages, the layers of a virtual stage and the full layout is given.
// The others are derived from it.
void derive_pipeline(Schema& s) {
  s.derive<Config>(
      "dist.virtual_pipeline_model_parallel_size",
      "stages of dist.pipeline_model_parallel_layout / dist.pipeline_model_parallel_size, or "
      "model.num_layers (with "
      "dist.account_for_embedding_in_pipeline_split and dist.account_for_loss_in_pipeline_split) / "
      "dist.pipeline_model_parallel_size / dist.num_layers_per_virtual_pipeline_stage, or 2 where "
      "dist.pipeline_schedule is zb_v",
      [](Config& c) {
        auto& d = c.dist;
        const int64_t pp = d.pipeline_model_parallel_size;
        if (pp < 2) return;
        if (d.pipeline_model_parallel_layout) {
          const auto layout = parse_pipeline_layout(*d.pipeline_model_parallel_layout);
          const auto stages = static_cast<int64_t>(layout.stages.size());
          if (layout.ok() && stages % pp == 0 && stages > pp)
            d.virtual_pipeline_model_parallel_size = stages / pp;
        } else if (d.num_layers_per_virtual_pipeline_stage) {
          const int64_t units = c.model.num_layers + (d.account_for_embedding_in_pipeline_split ? 1 : 0) +
                                (d.account_for_loss_in_pipeline_split ? 1 : 0);
          const int64_t each = *d.num_layers_per_virtual_pipeline_stage;
          if (units % pp == 0 && units / pp % each == 0 && units / pp / each > 1)
            d.virtual_pipeline_model_parallel_size = units / pp / each;
        } else if (d.pipeline_schedule == PipelineSchedule::zb_v) {
          d.virtual_pipeline_model_parallel_size = 2;
        }
      });
  s.derive<Config>(
      "dist.num_layers_per_virtual_pipeline_stage",
      "model.num_layers (with dist.account_for_embedding_in_pipeline_split and "
      "dist.account_for_loss_in_pipeline_split) / dist.pipeline_model_parallel_size / "
      "dist.virtual_pipeline_model_parallel_size, unless dist.num_layers_in_first_pipeline_stage, "
      "dist.num_layers_in_last_pipeline_stage or dist.pipeline_model_parallel_layout make stages differ",
      [](Config& c) {
        auto& d = c.dist;
        if (!d.virtual_pipeline_model_parallel_size || !layout_is_the_split(c) ||
            d.num_layers_in_first_pipeline_stage || d.num_layers_in_last_pipeline_stage)
          return;
        const int64_t units = c.model.num_layers + (d.account_for_embedding_in_pipeline_split ? 1 : 0) +
                              (d.account_for_loss_in_pipeline_split ? 1 : 0);
        const auto chunks = try_mul(d.pipeline_model_parallel_size, *d.virtual_pipeline_model_parallel_size);
        if (chunks && units % *chunks == 0) d.num_layers_per_virtual_pipeline_stage = units / *chunks;
      });
  s.derive<Config>(
      "dist.pipeline_model_parallel_layout",
      "model.num_layers (and model.mtp_num_layers) over dist.pipeline_model_parallel_size * "
      "dist.virtual_pipeline_model_parallel_size stages, with dist.num_layers_in_first_pipeline_stage, "
      "dist.num_layers_in_last_pipeline_stage, dist.account_for_embedding_in_pipeline_split and "
      "dist.account_for_loss_in_pipeline_split",
      [](Config& c) {
        if (c.dist.pipeline_model_parallel_size < 2) return;
        if (const auto stages = pipeline_stages(c))
          c.dist.pipeline_model_parallel_layout = pipeline_layout_text(*stages);
      });
  s.derive<Config>(
      "dist.microbatch_group_size_per_vp_stage",
      "dist.pipeline_model_parallel_size where dist.virtual_pipeline_model_parallel_size is set "
      "and dist.pipeline_schedule is not zb_v",
      [](Config& c) {
        if (c.dist.virtual_pipeline_model_parallel_size && c.dist.pipeline_schedule != PipelineSchedule::zb_v)
          c.dist.microbatch_group_size_per_vp_stage = c.dist.pipeline_model_parallel_size;
      });
  s.derive<Config>("dist.pipeline_schedule",
                   "1f1b where dist.pipeline_model_parallel_size is above 1, interleaved_1f1b where "
                   "dist.virtual_pipeline_model_parallel_size is too",
                   [](Config& c) {
                     if (c.dist.pipeline_model_parallel_size < 2) return;
                     c.dist.pipeline_schedule = c.dist.virtual_pipeline_model_parallel_size.value_or(1) > 1
                                                    ? PipelineSchedule::interleaved
                                                    : PipelineSchedule::one_f_one_b;
                   });
  s.derive<Config>("comm_overlap.overlap_p2p_comm",
                   "true where dist.pipeline_model_parallel_size is above 1, and "
                   "dist.virtual_pipeline_model_parallel_size too or dist.pipeline_schedule is zb_h1",
                   [](Config& c) {
                     if (c.dist.pipeline_model_parallel_size > 1)
                       c.comm_overlap.overlap_p2p_comm =
                           c.dist.virtual_pipeline_model_parallel_size.value_or(1) > 1 ||
                           c.dist.pipeline_schedule == PipelineSchedule::zb_h1;
                   });
  s.derive<Config>("comm_overlap.batch_p2p_comm",
                   "not comm_overlap.overlap_p2p_comm, where dist.pipeline_model_parallel_size is above 1",
                   [](Config& c) {
                     if (c.dist.pipeline_model_parallel_size > 1 && c.comm_overlap.overlap_p2p_comm)
                       c.comm_overlap.batch_p2p_comm = !*c.comm_overlap.overlap_p2p_comm;
                   });
}

void derive_batch(Schema& s) {
  s.derive<Config>("train.global_batch_size", "train.micro_batch_size * dist.data_parallel_size",
                   [](Config& c) {
                     if (c.dist.data_parallel_size)
                       c.train.global_batch_size = c.train.micro_batch_size * *c.dist.data_parallel_size;
                   });
  s.derive<Config>(
      "train.num_microbatches",
      "train.global_batch_size / (train.micro_batch_size * dist.data_parallel_size), rounded down "
      "with train.decrease_batch_size_if_needed",
      [](Config& c) {
        if (!c.dist.data_parallel_size || !c.train.global_batch_size) return;
        const int64_t together = c.train.micro_batch_size * *c.dist.data_parallel_size;
        if (together > 0 &&
            (c.train.decrease_batch_size_if_needed || *c.train.global_batch_size % together == 0))
          c.train.num_microbatches = *c.train.global_batch_size / together;
      });
  s.derive<Config>(
      "train.train_iters",
      "train.train_samples / train.global_batch_size; the full steps in them where "
      "train.rampup_batch_size is set, or train.decrease_batch_size_if_needed rounds the batch to "
      "a multiple of train.micro_batch_size * dist.data_parallel_size",
      [](Config& c) {
        const auto ramp = BatchRamp::of(c);
        if (!c.train.train_samples || !ramp) return;
        if (const int64_t steps = ramp->steps_in(*c.train.train_samples); steps > 0)
          c.train.train_iters = steps;
      });
  s.derive<Config>("validation.eval_global_batch_size", "train.global_batch_size",
                   [](Config& c) { c.validation.eval_global_batch_size = c.train.global_batch_size; });
  s.derive<Config>("validation.eval_micro_batch_size", "train.micro_batch_size",
                   [](Config& c) { c.validation.eval_micro_batch_size = c.train.micro_batch_size; });
}

int64_t share_of(double fraction, int64_t total) {
  return static_cast<int64_t>(std::llround(fraction * static_cast<double>(total)));
}

// The product as people write it: 0.1 * 3e-4 is 3e-5, not its neighbor 2.9999999999999997e-05.
double ratio_of(double ratio, double total) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.15g", ratio * total);
  return parse_double(text.data()).value_or(ratio * total);
}

void derive_schedule(Schema& s) {
  s.derive<Config>("optimizer.min_lr", "optimizer.min_lr_ratio * optimizer.lr; else 0", [](Config& c) {
    c.optimizer.min_lr = ratio_of(c.optimizer.min_lr_ratio.value_or(0.0), c.optimizer.lr);
  });
  s.derive<Config>("optimizer.decoupled_min_lr",
                   "where optimizer.decoupled_lr is set: optimizer.min_lr_ratio * optimizer.decoupled_lr, "
                   "else optimizer.min_lr",
                   [](Config& c) {
                     auto& o = c.optimizer;
                     if (!o.decoupled_lr) return;
                     o.decoupled_min_lr =
                         o.min_lr_ratio ? ratio_of(*o.min_lr_ratio, *o.decoupled_lr) : o.min_lr;
                   });
  s.derive<Config>("scheduler.lr_decay_iters", "train.train_iters, unless train.train_samples is set",
                   [](Config& c) {
                     if (!c.train.train_samples) c.scheduler.lr_decay_iters = c.train.train_iters;
                   });
  s.derive<Config>("scheduler.lr_decay_samples", "train.train_samples",
                   [](Config& c) { c.scheduler.lr_decay_samples = c.train.train_samples; });
  s.derive<Config>("scheduler.lr_warmup_iters",
                   "scheduler.lr_warmup_fraction * scheduler.lr_decay_iters, rounded; else 0", [](Config& c) {
                     if (c.scheduler.lr_decay_iters)
                       c.scheduler.lr_warmup_iters =
                           share_of(c.scheduler.lr_warmup_fraction.value_or(0), *c.scheduler.lr_decay_iters);
                   });
  s.derive<Config>(
      "scheduler.lr_warmup_samples",
      "scheduler.lr_warmup_fraction * scheduler.lr_decay_samples, rounded; else 0", [](Config& c) {
        if (c.scheduler.lr_decay_samples)
          c.scheduler.lr_warmup_samples =
              share_of(c.scheduler.lr_warmup_fraction.value_or(0), *c.scheduler.lr_decay_samples);
      });
  s.derive<Config>(
      "scheduler.lr_wsd_decay_iters",
      "scheduler.lr_wsd_decay_fraction * scheduler.lr_decay_iters, rounded, at least 1", [](Config& c) {
        if (c.scheduler.lr_wsd_decay_fraction && c.scheduler.lr_decay_iters)
          c.scheduler.lr_wsd_decay_iters =
              std::max<int64_t>(1, share_of(*c.scheduler.lr_wsd_decay_fraction, *c.scheduler.lr_decay_iters));
      });
  s.derive<Config>("scheduler.lr_wsd_decay_samples",
                   "scheduler.lr_wsd_decay_fraction * scheduler.lr_decay_samples, rounded, at least 1",
                   [](Config& c) {
                     if (c.scheduler.lr_wsd_decay_fraction && c.scheduler.lr_decay_samples)
                       c.scheduler.lr_wsd_decay_samples = std::max<int64_t>(
                           1, share_of(*c.scheduler.lr_wsd_decay_fraction, *c.scheduler.lr_decay_samples));
                   });
}

void derive_rest(Schema& s) {
  s.derive<Config>("mixed_precision.pipeline_dtype",
                   "mixed_precision.params_dtype; fp32 with model.fp32_residual_connection", [](Config& c) {
                     c.mixed_precision.pipeline_dtype =
                         c.model.fp32_residual_connection ? Precision::fp32 : c.mixed_precision.params_dtype;
                   });
  s.derive<Config>("dataset.split", "969,30,1 where dataset.data_path or dataset.blend names the data",
                   [](Config& c) {
                     if (!c.dataset.data_path.empty() || !c.dataset.blend.empty())
                       c.dataset.split = "969,30,1";
                   });
  s.derive<Config>(
      "ddp.bucket_size", "max(40000000, 1000000 * dist.data_parallel_size) unless gradients are sharded",
      [](Config& c) {
        if (c.dist.data_parallel_size &&
            c.ddp.data_parallel_sharding_strategy < ShardingStrategy::optim_grads)
          c.ddp.bucket_size = std::max<int64_t>(40'000'000, 1'000'000 * *c.dist.data_parallel_size);
      });
  s.derive<Config>("peft.lora_dtype", "mixed_precision.params_dtype", [](Config& c) {
    if (c.peft) c.peft->lora_dtype = c.mixed_precision.params_dtype;
  });
}

}  // namespace

void register_derivations(Schema& s) {
  derive_model(s);
  derive_world(s);
  derive_pipeline(s);
  derive_batch(s);
  derive_schedule(s);
  derive_rest(s);
}

}  // namespace capstan::config
