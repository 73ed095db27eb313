#include "config/sections/conditions.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool is_fp16(const Config& c) {
  return c.mixed_precision.params_dtype == Precision::fp16;
}
bool computes_in_fp32(const Config& c) {
  return c.mixed_precision.params_dtype == Precision::fp32;
}
bool scales_dynamically(const Config& c) {
  return !c.mixed_precision.loss_scale;
}
bool has_fp8(const Config& c) {
  return c.mixed_precision.fp8.has_value();
}
bool has_fp4(const Config& c) {
  return c.mixed_precision.fp4.has_value();
}
bool has_low(const Config& c) {
  return has_fp8(c) || has_fp4(c);
}
bool has_edge_layers(const Config& c) {
  return has_low(c) && c.mixed_precision.first_last_layers_bf16;
}
bool is_delayed(const Config& c) {
  return has_fp8(c) && c.mixed_precision.fp8_recipe == Fp8Recipe::delayed;
}
}  // namespace

void describe(Section<MixedPrecisionConfig>& s) {
  using M = MixedPrecisionConfig;
  const char* fp16 = "`mixed_precision.params_dtype` is fp16";
  const char* dynamic = "`mixed_precision.loss_scale` is null";
  const char* fp8 = "`mixed_precision.fp8` is set";
  const char* fp4 = "`mixed_precision.fp4` is set";
  s.doc("number formats of parameters, gradients, activations and GEMMs");
  s.field("params_dtype", &M::params_dtype)
      .doc(
          "number format of parameters and activations in the forward and backward pass; main parameters: "
          "optimizer.main_params_dtype; typical: bf16")
      .alias("model.params_dtype")
      .known_as("bf16")
      .known_as("fp16")
      .known_as("fp32")
      .known_as("autocast_dtype")
      .known_as("dtype")
      .known_as("precision");
  s.field("pipeline_dtype", &M::pipeline_dtype)
      .doc("number format of the activations sent between pipeline stages; always the compute format")
      .alias("model.pipeline_dtype");
  s.field("grad_reduce_in_fp32", &M::grad_reduce_in_fp32)
      .doc(
          "reduce gradients in fp32; false: in params_dtype, with half the traffic; accumulated in "
          "optimizer.main_grads_dtype")
      .alias("ddp.grad_reduce_in_fp32");
  s.field("tf32", &M::tf32)
      .doc(
          "round the operands of fp32 GEMMs to TF32 (10 bits of mantissa), which the tensor cores of GPUs "
          "multiply; not on the CPU")
      .known_as("allow_tf32")
      .used_when<Config>("`mixed_precision.params_dtype` is fp32", computes_in_fp32);
  s.field("loss_scale", &M::loss_scale)
      .doc("static loss scale; null: dynamic loss scaling")
      .above(0)
      .alias("optimizer.loss_scale")
      .used_when<Config>(fp16, is_fp16);
  s.field("initial_loss_scale", &M::initial_loss_scale)
      .doc("initial dynamic loss scale")
      .min(1)
      .alias("optimizer.initial_loss_scale")
      .used_when<Config>(fp16, is_fp16)
      .used_when<Config>(dynamic, scales_dynamically);
  s.field("min_loss_scale", &M::min_loss_scale)
      .doc("minimum dynamic loss scale")
      .above(0)
      .alias("optimizer.min_loss_scale")
      .used_when<Config>(fp16, is_fp16)
      .used_when<Config>(dynamic, scales_dynamically);
  s.field("loss_scale_window", &M::loss_scale_window)
      .doc("consecutive steps without overflow after which the loss scale doubles")
      .unit("iterations")
      .min(1)
      .alias("optimizer.loss_scale_window")
      .used_when<Config>(fp16, is_fp16)
      .used_when<Config>(dynamic, scales_dynamically);
  s.field("hysteresis", &M::hysteresis)
      .doc("overflows after which the loss scale halves")
      .unit("iterations")
      .min(1)
      .alias("optimizer.hysteresis")
      .used_when<Config>(fp16, is_fp16)
      .used_when<Config>(dynamic, scales_dynamically);
  s.field("fp8", &M::fp8).doc("FP8 format of the GEMMs; null: none").alias("model.fp8");
  s.field("fp8_recipe", &M::fp8_recipe)
      .doc("FP8 scaling recipe")
      .alias("model.fp8_recipe")
      .used_when<Config>(fp8, has_fp8);
  s.field("fp8_margin", &M::fp8_margin)
      .doc("margin of the FP8 scaling factor, in powers of two below the maximum of the format")
      .range(0, 16)
      .used_when<Config>("`mixed_precision.fp8_recipe` is delayed", is_delayed);
  s.field("fp8_amax_history_len", &M::fp8_amax_history_len)
      .doc("length of the amax history of delayed scaling")
      .unit("iterations")
      .min(1)
      .used_when<Config>("`mixed_precision.fp8_recipe` is delayed", is_delayed);
  s.field("fp8_amax_compute_algo", &M::fp8_amax_compute_algo)
      .doc("reduction of the amax history to one value")
      .used_when<Config>("`mixed_precision.fp8_recipe` is delayed", is_delayed);
  s.field("fp8_wgrad", &M::fp8_wgrad)
      .doc("compute weight gradients in FP8 as well")
      .used_when<Config>(fp8, has_fp8)
      .used_when<Config>("`peft` is null", trains_all_layers);
  s.field("fp8_param_gather", &M::fp8_param_gather)
      .doc("all-gather sharded weights as FP8 codes; with delayed and tensorwise scaling; changes no result")
      .effect(Effect::perf)
      .alias("ddp.fp8_param_gather")
      .used_when<Config>(fp8, has_fp8)
      .used_when<Config>("`peft` is null", trains_all_layers);
  s.field("fp4", &M::fp4).doc("FP4 format of the GEMMs; null: none").alias("model.fp4");
  s.field("fp4_recipe", &M::fp4_recipe).doc("FP4 scaling recipe").used_when<Config>(fp4, has_fp4);
  s.field("fp4_param_gather", &M::fp4_param_gather)
      .doc("all-gather sharded weights in FP4; not supported where parameters are sharded")
      .effect(Effect::perf)
      .alias("ddp.fp4_param_gather")
      .used_when<Config>(fp4, has_fp4);
  s.field("first_last_layers_bf16", &M::first_last_layers_bf16)
      .doc("keep the first and last layers in bf16 instead of FP8 or FP4")
      .used_when<Config>("`mixed_precision.fp8` or `mixed_precision.fp4` is set", has_low);
  s.field("num_layers_at_start_in_bf16", &M::num_layers_at_start_in_bf16)
      .doc("number of first layers that stay in bf16")
      .unit("layers")
      .min(0)
      .used_when<Config>("`mixed_precision.first_last_layers_bf16` is true", has_edge_layers);
  s.field("num_layers_at_end_in_bf16", &M::num_layers_at_end_in_bf16)
      .doc("number of last layers that stay in bf16")
      .unit("layers")
      .min(0)
      .used_when<Config>("`mixed_precision.first_last_layers_bf16` is true", has_edge_layers);
}

}  // namespace capstan::config
