#include "config/sections/conditions.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
// Muon updates only matrices; AdamW the rest. The adapters of LoRA are matrices.
bool has_adam(const Config& c) {
  const bool only_matrices = c.peft && !has_magnitudes(c.peft->scheme);
  return c.optimizer.optimizer == OptimizerKind::adam ||
         (c.optimizer.optimizer == OptimizerKind::muon && !only_matrices);
}
bool has_sgd(const Config& c) {
  return c.optimizer.optimizer == OptimizerKind::sgd;
}
bool has_lion(const Config& c) {
  return c.optimizer.optimizer == OptimizerKind::lion;
}
bool has_muon(const Config& c) {
  return c.optimizer.optimizer == OptimizerKind::muon;
}
bool has_own_rate(const Config& c) {
  return c.optimizer.decoupled_lr.has_value();
}
bool has_muon_over_tensor_ranks(const Config& c) {
  return has_muon(c) && c.dist.tensor_model_parallel_size > 1;
}
bool stores_below_fp32(const Config& c) {
  const OptimizerConfig& o = c.optimizer;
  return o.exp_avg_dtype != MomentType::fp32 || o.exp_avg_sq_dtype != MomentType::fp32 ||
         o.main_params_dtype != Precision::fp32;
}
bool is_fp16(const Value& v) {
  return v.text == "fp16";
}
}  // namespace

void describe(Section<OptimizerConfig>& s) {
  using O = OptimizerConfig;
  const char* adam = "`optimizer.optimizer` is adam, or muon, for parameters that are not matrices";
  s.doc("optimizer and its hyperparameters");
  s.field("optimizer", &O::optimizer).doc("optimization algorithm").known_as("type").known_as("name");
  s.field("lr", &O::lr)
      .doc(
          "peak learning rate; typical: 3e-4 for pretraining, 1e-5 for full fine-tuning, 1e-4 for LoRA; "
          "smaller for larger models")
      .above(0)
      .max(100)
      .required()
      .alias("learning_rate")
      .alias("max_lr");
  s.field("min_lr", &O::min_lr).doc("learning rate at the end of the decay; typical: lr / 10").min(0);
  s.field("min_lr_ratio", &O::min_lr_ratio)
      .doc("learning rate at the end of the decay as a fraction of lr, and of decoupled_lr; typical: 0.1")
      .fraction()
      .instead_of("optimizer.min_lr")
      .known_as("cosine_min_lr_ratio")
      .known_as("cos_min_ratio")
      .known_as("min_lr_factor")
      .known_as("min_lr_rate");
  s.field("decoupled_lr", &O::decoupled_lr)
      .doc("peak learning rate of the embedding and output layer; null: lr")
      .above(0)
      .used_when<Config>("`peft` is null", trains_all_layers);
  s.field("decoupled_min_lr", &O::decoupled_min_lr)
      .doc("learning rate of the embedding and output layer at the end of the decay")
      .min(0)
      .used_when<Config>("`optimizer.decoupled_lr` is set", has_own_rate);
  s.field("weight_decay", &O::weight_decay)
      .doc("weight-decay coefficient; not applied to biases and norm weights; typical: 0.1 for pretraining")
      .min(0)
      .known_as("wd");
  s.field("decoupled_weight_decay", &O::decoupled_weight_decay)
      .doc(
          "apply weight decay directly to the weights (AdamW, SGDW); false: add it to the gradient (L2 "
          "regularization)");
  s.field("apply_wd_to_qk_layernorm", &O::apply_wd_to_qk_layernorm)
      .doc("apply weight decay to the norm weights of queries and keys as well")
      .used_when<Config>("`peft` is null", trains_all_layers);
  s.field("adam_beta1", &O::adam_beta1)
      .doc("exponential decay rate of the first-moment estimate; typical: 0.9")
      .min(0)
      .below(1)
      .used_when<Config>(adam, has_adam)
      .alias("beta1");
  s.field("adam_beta2", &O::adam_beta2)
      .doc("exponential decay rate of the second-moment estimate; typical: 0.95 for large models, else 0.999")
      .min(0)
      .below(1)
      .used_when<Config>(adam, has_adam)
      .alias("beta2");
  s.field("adam_eps", &O::adam_eps)
      .doc(
          "constant added to the square root of the second-moment estimate for numerical stability; typical: "
          "1e-8")
      .above(0)
      .used_when<Config>(adam, has_adam)
      .alias("eps");
  s.field("sgd_momentum", &O::sgd_momentum)
      .doc("momentum coefficient; typical: 0.9")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is sgd", has_sgd);
  s.field("lion_beta1", &O::lion_beta1)
      .doc("interpolation coefficient between momentum and gradient in the update direction; typical: 0.9")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is lion", has_lion);
  s.field("lion_beta2", &O::lion_beta2)
      .doc("exponential decay rate of the momentum")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is lion", has_lion);
  s.field("muon_momentum", &O::muon_momentum)
      .doc("momentum coefficient; typical: 0.95")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_use_nesterov", &O::muon_use_nesterov)
      .doc("use Nesterov momentum")
      .known_as("muon_nesterov")
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_num_ns_steps", &O::muon_num_ns_steps)
      .doc("Newton-Schulz iterations of the orthogonalization; typical: 5")
      .unit("iterations")
      .range(1, 20)
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_coefficient_type", &O::muon_coefficient_type)
      .doc("coefficients of the Newton-Schulz iterations")
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_scale_mode", &O::muon_scale_mode)
      .doc("scaling of the update by the dimensions of the matrix")
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_extra_scale_factor", &O::muon_extra_scale_factor)
      .doc("further factor of the update; 0.2 with spectral gives the update size of AdamW")
      .above(0)
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_split_qkv", &O::muon_split_qkv)
      .doc("orthogonalize queries, keys and values separately")
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon)
      .used_when<Config>("`peft` is null", trains_all_layers);
  s.field("muon_tp_mode", &O::muon_tp_mode)
      .doc("how matrices that are sharded over tensor-parallel ranks are orthogonalized")
      .used_when<Config>("`optimizer.optimizer` is muon and `dist.tensor_model_parallel_size` is above 1",
                         has_muon_over_tensor_ranks);
  s.field("clip_grad", &O::clip_grad)
      .doc("maximum global L2 norm of the gradients; 0 disables clipping; typical: 1.0")
      .min(0)
      .known_as("grad_clip")
      .known_as("max_grad_norm")
      .known_as("gradient_clip_val");
  s.field("grad_norm_skip_threshold", &O::grad_norm_skip_threshold)
      .doc("skip updates whose gradient norm exceeds this; null: never")
      .above(0);
  s.field("use_precision_aware_optimizer", &O::use_precision_aware_optimizer)
      .doc(
          "store optimizer state in main_grads_dtype, main_params_dtype, exp_avg_dtype and exp_avg_sq_dtype; "
          "optimizer adam only");
  s.field("main_grads_dtype", &O::main_grads_dtype)
      .doc(
          "number format of the gradients that the optimizer reads; bf16: the sum is rounded after each "
          "micro-batch");
  s.field("main_params_dtype", &O::main_params_dtype)
      .doc(
          "number format of the main parameters; bf16: none, the model's bf16 parameters are updated in "
          "place")
      .unsupported("main parameters in fp16", is_fp16);
  s.field("exp_avg_dtype", &O::exp_avg_dtype)
      .doc("number format of the first-moment estimate")
      .unsupported("moments in fp16", is_fp16);
  s.field("exp_avg_sq_dtype", &O::exp_avg_sq_dtype)
      .doc("number format of the second-moment estimate")
      .unsupported("moments in fp16", is_fp16);
  s.field("stochastic_rounding", &O::stochastic_rounding)
      .doc(
          "round moments and parameters below fp32 up or down at random with the exact mean; recommended "
          "with them")
      .used_when<Config>("a moment or the main parameters are stored below fp32", stores_below_fp32);
  s.field("optimizer_cpu_offload", &O::optimizer_cpu_offload)
      .doc(
          "keep main parameters and moments in host memory or optimizer_offload_path; no effect on the CPU "
          "without the latter")
      .effect(Effect::memory);
  s.field("optimizer_offload_fraction", &O::optimizer_offload_fraction)
      .doc("offloaded fraction of the optimizer state: the last elements of each bucket that a rank updates")
      .fraction()
      .effect(Effect::memory)
      .used_when<Config>("`optimizer.optimizer_cpu_offload` is true",
                         [](const Config& c) { return c.optimizer.optimizer_cpu_offload; });
  s.field("optimizer_offload_path", &O::optimizer_offload_path)
      .doc("directory for the offloaded state, in an unnamed file of each rank; null: host memory")
      .effect(Effect::memory)
      .known_as("nvme_path")
      .used_when<Config>("`optimizer.optimizer_cpu_offload` is true",
                         [](const Config& c) { return c.optimizer.optimizer_cpu_offload; });
  s.field("optimizer_offload_chunk_size", &O::optimizer_offload_chunk_size)
      .doc(
          "largest number of elements of offloaded state that are read at once; three such chunks are in "
          "memory")
      .unit("parameters")
      .min(4096)
      .effect(Effect::memory)
      .known_as("sub_group_size")
      .used_when<Config>("`optimizer.optimizer_offload_path` is set", [](const Config& c) {
        return c.optimizer.optimizer_cpu_offload && c.optimizer.optimizer_offload_path;
      });
}

}  // namespace capstan::config
