#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool has_adam(const Config& c) {
  return c.optimizer.optimizer == OptimizerKind::adam || c.optimizer.optimizer == OptimizerKind::muon;
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
bool is_lion_or_muon(const Value& v) {
  return v.text == "lion" || v.text == "muon";
}
}  // namespace

void describe(Section<OptimizerConfig>& s) {
  using O = OptimizerConfig;
  const char* adam = "`optimizer.optimizer` is adam or muon";
  s.doc("the optimizer and its coefficients");
  s.field("optimizer", &O::optimizer)
      .doc("which update")
      .not_yet("this optimizer", is_lion_or_muon)
      .known_as("type")
      .known_as("name");
  s.field("lr", &O::lr)
      .doc("peak learning rate")
      .above(0)
      .max(100)
      .required()
      .alias("learning_rate")
      .alias("max_lr");
  s.field("min_lr", &O::min_lr).doc("learning rate at the end of the decay").min(0);
  s.field("min_lr_ratio", &O::min_lr_ratio)
      .doc("learning rate at the end of the decay as a fraction of lr, and of decoupled_lr")
      .fraction()
      .instead_of("optimizer.min_lr")
      .known_as("cosine_min_lr_ratio")
      .known_as("cos_min_ratio")
      .known_as("min_lr_factor")
      .known_as("min_lr_rate");
  s.field("decoupled_lr", &O::decoupled_lr)
      .doc("peak learning rate of embedding and head; null: lr")
      .above(0);
  s.field("decoupled_min_lr", &O::decoupled_min_lr)
      .doc("end of the decay for embedding and head")
      .min(0)
      .used_when<Config>("`optimizer.decoupled_lr` is set", has_own_rate);
  s.field("weight_decay", &O::weight_decay)
      .doc(
          "share of a weight that is taken off at each step, times the learning rate; not for vectors and "
          "biases")
      .min(0);
  s.field("decoupled_weight_decay", &O::decoupled_weight_decay)
      .doc("decay apart from the gradient (AdamW, SGDW); false: added to the gradient (L2)");
  s.field("apply_wd_to_qk_layernorm", &O::apply_wd_to_qk_layernorm)
      .doc("decay the norms of queries and keys too");
  s.field("adam_beta1", &O::adam_beta1)
      .doc("how much of the mean of gradients a step keeps")
      .min(0)
      .below(1)
      .used_when<Config>(adam, has_adam)
      .alias("beta1");
  s.field("adam_beta2", &O::adam_beta2)
      .doc("how much of the mean of squared gradients a step keeps")
      .min(0)
      .below(1)
      .used_when<Config>(adam, has_adam)
      .alias("beta2");
  s.field("adam_eps", &O::adam_eps)
      .doc("added to the root of the mean of squares")
      .above(0)
      .used_when<Config>(adam, has_adam)
      .alias("eps");
  s.field("sgd_momentum", &O::sgd_momentum)
      .doc("how much of the last update a step keeps")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is sgd", has_sgd);
  s.field("lion_beta1", &O::lion_beta1)
      .doc("share of the momentum in the sign")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is lion", has_lion);
  s.field("lion_beta2", &O::lion_beta2)
      .doc("how much of the momentum a step keeps")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is lion", has_lion);
  s.field("muon_momentum", &O::muon_momentum)
      .doc("how much of the momentum a step keeps")
      .min(0)
      .below(1)
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_use_nesterov", &O::muon_use_nesterov)
      .doc("look ahead along the momentum")
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_num_ns_steps", &O::muon_num_ns_steps)
      .doc("Newton-Schulz iterations")
      .unit("iterations")
      .range(1, 20)
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("muon_scale_mode", &O::muon_scale_mode)
      .doc("how the update is scaled by the matrix's shape")
      .used_when<Config>("`optimizer.optimizer` is muon", has_muon);
  s.field("clip_grad", &O::clip_grad)
      .doc("largest global L2 norm of the gradients; larger ones are scaled down; 0: off")
      .min(0)
      .known_as("grad_clip")
      .known_as("max_grad_norm")
      .known_as("gradient_clip_val");
  s.field("grad_norm_skip_threshold", &O::grad_norm_skip_threshold)
      .doc("an update whose gradient norm is above this is skipped; null: none")
      .above(0);
  s.field("use_precision_aware_optimizer", &O::use_precision_aware_optimizer)
      .doc("main parameters, gradients and moments in the four formats below")
      .not_yet("optimizer state below fp32");
  s.field("main_grads_dtype", &O::main_grads_dtype).doc("number format of the gradients the optimizer reads");
  s.field("main_params_dtype", &O::main_params_dtype).doc("number format of the main parameters");
  s.field("exp_avg_dtype", &O::exp_avg_dtype).doc("number format of Adam's mean of gradients");
  s.field("exp_avg_sq_dtype", &O::exp_avg_sq_dtype).doc("number format of Adam's mean of squared gradients");
  s.field("optimizer_cpu_offload", &O::optimizer_cpu_offload)
      .doc("optimizer state and update on the host")
      .effect(Effect::memory)
      .not_yet("optimizer offload");
  s.field("optimizer_offload_fraction", &O::optimizer_offload_fraction)
      .doc("share of the state that is on the host")
      .fraction()
      .effect(Effect::memory)
      .used_when<Config>("`optimizer.optimizer_cpu_offload` is true",
                         [](const Config& c) { return c.optimizer.optimizer_cpu_offload; });
}

}  // namespace capstan::config
