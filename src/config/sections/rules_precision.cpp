// Number formats that exclude or need each other.
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(precision_rules)

namespace {

bool low(const Config& c) {
  return c.mixed_precision.fp8 || c.mixed_precision.fp4;
}
std::string name_of(Precision precision) {
  return std::string(enum_name(precision));
}

RULE("R0501", fp8_excludes_fp4, "fp8 and fp4 exclude each other", "mixed_precision.fp8",
     "mixed_precision.fp4") {
  if (!c.mixed_precision.fp8 || !c.mixed_precision.fp4) return;
  report.error("`mixed_precision.fp8` and `mixed_precision.fp4` exclude each other")
      .help("set one of them to null");
}

RULE("R0502", low_precision_gemms_need_16_bit_parameters, "FP8 and FP4 GEMMs need bf16 or fp16 parameters",
     "mixed_precision.params_dtype", "mixed_precision.fp8", "mixed_precision.fp4") {
  if (!low(c) || is_16_bit(c.mixed_precision.params_dtype)) return;
  report.error("FP8 and FP4 GEMMs need bf16 or fp16 parameters, but `mixed_precision.params_dtype` is fp32")
      .help("set mixed_precision.params_dtype=bf16");
}

RULE("R0503", low_precision_gather_needs_sharding,
     "fp8_param_gather and fp4_param_gather have an effect only with sharded parameters",
     "mixed_precision.fp8_param_gather", "mixed_precision.fp4_param_gather",
     "ddp.data_parallel_sharding_strategy") {
  if (shards(c)) return;
  const auto check = [&](const std::string& path, bool gathers) {
    if (gathers)
      report
          .warning(
              "`" + path +
              "` has no effect: `ddp.data_parallel_sharding_strategy` is no_shard, and parameters are not "
              "gathered")
          .at(path)
          .operand("ddp.data_parallel_sharding_strategy")
          .help("set " + path + "=false");
  };
  check("mixed_precision.fp8_param_gather", c.mixed_precision.fp8 && c.mixed_precision.fp8_param_gather);
  check("mixed_precision.fp4_param_gather", c.mixed_precision.fp4 && c.mixed_precision.fp4_param_gather);
}

RULE("R0513", block_scales_exclude_param_gather, "weights with scales of blocks are gathered in params_dtype",
     "mixed_precision.fp8_param_gather", "mixed_precision.fp4_param_gather", "mixed_precision.fp8_recipe",
     "ddp.data_parallel_sharding_strategy") {
  const auto& m = c.mixed_precision;
  if (!shards(c)) return;
  const auto refuse = [&](const char* path, std::string_view recipe) {
    report
        .error("`" + std::string(path) + "`: the blocks of " + std::string(recipe) +
               " cross the shards of a weight, which is gathered in `mixed_precision.params_dtype`")
        .at(path)
        .help("set " + std::string(path) + "=false; delayed and tensorwise scaling gather codes");
  };
  if (m.fp8 && m.fp8_param_gather && m.fp8_recipe != Fp8Recipe::delayed &&
      m.fp8_recipe != Fp8Recipe::tensorwise)
    refuse("mixed_precision.fp8_param_gather", enum_name(m.fp8_recipe));
  if (m.fp4 && m.fp4_param_gather) refuse("mixed_precision.fp4_param_gather", enum_name(m.fp4_recipe));
}

RULE("R0514", low_precision_needs_unquantized_base,
     "FP8 and FP4 GEMMs exclude weights that are kept in 4 bits", "mixed_precision.fp8",
     "mixed_precision.fp4", "peft.base_quantization") {
  if (!low(c) || !c.peft || c.peft->base_quantization == BaseQuantization::none) return;
  report
      .error("`peft.base_quantization` keeps the weights in 4 bits, whose GEMMs are in " +
             name_of(c.mixed_precision.params_dtype) + ", not in FP8 or FP4")
      .help("set mixed_precision.fp8=null and mixed_precision.fp4=null, or peft.base_quantization=none");
}

RULE("R0504", delayed_scaling_covers_all_layers, "delayed scaling excludes first and last layers in bf16",
     "mixed_precision.fp8_recipe", "mixed_precision.first_last_layers_bf16") {
  const auto& m = c.mixed_precision;
  if (!m.fp8 || m.fp8_recipe != Fp8Recipe::delayed || !m.first_last_layers_bf16) return;
  report
      .error(
          "`mixed_precision.fp8_recipe` delayed and `mixed_precision.first_last_layers_bf16` exclude each "
          "other")
      .help("set mixed_precision.fp8_recipe=tensorwise, or mixed_precision.first_last_layers_bf16=false");
}

RULE("R0505", delayed_scaling_keeps_activations,
     "delayed scaling excludes recomputation of moe_act and layernorm", "mixed_precision.fp8_recipe",
     "model.recompute_modules") {
  const auto& m = c.mixed_precision;
  if (!m.fp8 || m.fp8_recipe != Fp8Recipe::delayed) return;
  for (const RecomputeModule module : c.model.recompute_modules)
    if (module == RecomputeModule::moe_act || module == RecomputeModule::layernorm)
      report
          .error("`mixed_precision.fp8_recipe` delayed cannot recompute " + std::string(enum_name(module)) +
                 ": the maxima would be counted twice")
          .help("set mixed_precision.fp8_recipe=tensorwise, or leave it out of model.recompute_modules");
}

RULE("R0506", no_more_layers_in_bf16_than_there_are,
     "layers kept in bf16 at the start and at the end are at most all layers",
     "mixed_precision.num_layers_at_start_in_bf16", "mixed_precision.num_layers_at_end_in_bf16",
     "model.num_layers") {
  const auto& m = c.mixed_precision;
  if (!low(c) || !m.first_last_layers_bf16) return;
  const int64_t start = m.num_layers_at_start_in_bf16, end = m.num_layers_at_end_in_bf16;
  if (start > c.model.num_layers || end > c.model.num_layers - start)
    report
        .error("`mixed_precision` keeps " + to_text(start) + " layers at the start and " + to_text(end) +
               " at the end in bf16, and the model has " + to_text(c.model.num_layers))
        .help("fewer, or mixed_precision=bf16_mixed, which has no GEMMs in fewer bits");
}

RULE("R0507", fp32_residual_needs_16_bit_parameters,
     "an fp32 residual connection is for bf16 or fp16 parameters", "model.fp32_residual_connection",
     "mixed_precision.params_dtype") {
  if (!c.model.fp32_residual_connection || is_16_bit(c.mixed_precision.params_dtype)) return;
  report.error("`model.fp32_residual_connection` has no effect where `mixed_precision.params_dtype` is fp32")
      .help("set model.fp32_residual_connection=false");
}

RULE("R0508", stages_exchange_the_residual, "pipeline_dtype is the data type of the hidden states",
     "mixed_precision.pipeline_dtype", "mixed_precision.params_dtype", "model.fp32_residual_connection") {
  if (!c.mixed_precision.pipeline_dtype) return;
  const Precision residual =
      c.model.fp32_residual_connection ? Precision::fp32 : c.mixed_precision.params_dtype;
  const Precision sent = *c.mixed_precision.pipeline_dtype;
  if (sent == residual) return;
  report
      .error("`mixed_precision.pipeline_dtype` " + name_of(sent) +
             ": stages exchange the hidden states as they are, in " + name_of(residual))
      .help("set mixed_precision.pipeline_dtype=" + name_of(residual));
}

RULE("R0509", loss_scale_bounds, "min_loss_scale is at most initial_loss_scale",
     "mixed_precision.min_loss_scale", "mixed_precision.initial_loss_scale") {
  const auto& m = c.mixed_precision;
  if (m.params_dtype != Precision::fp16 || m.loss_scale || m.min_loss_scale <= m.initial_loss_scale) return;
  report
      .error("`mixed_precision.min_loss_scale` " + to_text(m.min_loss_scale) +
             " is above `mixed_precision.initial_loss_scale` " + to_text(m.initial_loss_scale))
      .help("set min_loss_scale to at most " + to_text(m.initial_loss_scale));
}

RULE("R0510", reduction_dtype_has_effect,
     "grad_reduce_in_fp32=false has an effect only with bf16 or fp16 parameters, and with gradients in bf16 "
     "only where they are sharded",
     "mixed_precision.grad_reduce_in_fp32", "mixed_precision.params_dtype", "optimizer.main_grads_dtype",
     "ddp.data_parallel_sharding_strategy") {
  if (c.mixed_precision.grad_reduce_in_fp32) return;
  const std::string no_effect = "`mixed_precision.grad_reduce_in_fp32` false has no effect: ",
                    help = "set mixed_precision.grad_reduce_in_fp32=true";
  const ShardingStrategy sharding = c.ddp.data_parallel_sharding_strategy;
  if (!is_16_bit(c.mixed_precision.params_dtype))
    report.warning(no_effect + "gradients are fp32 with fp32 parameters").help(help);
  else if (c.optimizer.main_grads_dtype == Precision::bf16 &&
           (sharding == ShardingStrategy::no_shard || sharding == ShardingStrategy::optim))
    report.warning(no_effect + "gradients in bf16 are sent as they are, and summed in fp32").help(help);
}

RULE("R0516", tf32_needs_a_gpu, "tf32 has an effect only on GPUs", "mixed_precision.tf32", "train.device") {
  if (!c.mixed_precision.tf32 || (c.train.device != DeviceKind::cpu && c.train.device != DeviceKind::checked))
    return;
  report
      .warning("`mixed_precision.tf32` true has no effect: `train.device` " +
               std::string(enum_name(c.train.device)) + " multiplies fp32 operands as they are")
      .help("set mixed_precision.tf32=false, or train.device=auto");
}

RULE("R0511", state_formats_need_precision_aware,
     "optimizer state below fp32 needs use_precision_aware_optimizer, which is for adam",
     "optimizer.use_precision_aware_optimizer", "optimizer.optimizer", "optimizer.main_grads_dtype",
     "optimizer.main_params_dtype", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype") {
  const auto& o = c.optimizer;
  if (o.use_precision_aware_optimizer) {
    if (o.optimizer != OptimizerKind::adam)
      report
          .error("`optimizer.use_precision_aware_optimizer` is for adam, `optimizer.optimizer` is " +
                 std::string(enum_name(o.optimizer)))
          .operand("optimizer.use_precision_aware_optimizer")
          .operand("optimizer.optimizer")
          .help("set optimizer.optimizer=adam");
    return;
  }
  const std::pair<const char*, std::string> formats[] = {
      {"optimizer.main_grads_dtype", name_of(o.main_grads_dtype)},
      {"optimizer.main_params_dtype", name_of(o.main_params_dtype)},
      {"optimizer.exp_avg_dtype", std::string(enum_name(o.exp_avg_dtype))},
      {"optimizer.exp_avg_sq_dtype", std::string(enum_name(o.exp_avg_sq_dtype))}};
  for (const auto& [path, format] : formats)
    if (format != "fp32")
      report
          .error("`" + std::string(path) + "` " + format + " needs `optimizer.use_precision_aware_optimizer`")
          .at(path)
          .operand("optimizer.use_precision_aware_optimizer")
          .help("set optimizer.use_precision_aware_optimizer=true, or " + std::string(path) + "=fp32");
}

RULE("R0512", main_params_have_a_format,
     "main parameters and gradients in bf16 are for bf16 parameters; main_params_dtype bf16 needs stochastic "
     "rounding; main_grads_dtype is not fp16",
     "optimizer.main_params_dtype", "optimizer.main_grads_dtype", "optimizer.stochastic_rounding",
     "mixed_precision.params_dtype") {
  const auto& o = c.optimizer;
  if (!o.use_precision_aware_optimizer) return;
  if (o.main_params_dtype == Precision::bf16 && c.mixed_precision.params_dtype != Precision::bf16)
    report
        .error(
            "`optimizer.main_params_dtype` bf16 is for a model in bf16, `mixed_precision.params_dtype` is " +
            name_of(c.mixed_precision.params_dtype))
        .at("optimizer.main_params_dtype")
        .help("set mixed_precision=bf16_mixed, or optimizer.main_params_dtype=fp32");
  else if (o.main_params_dtype == Precision::bf16 && !o.stochastic_rounding)
    report.error("`optimizer.main_params_dtype` bf16 loses small updates, which are rounded to nearest")
        .at("optimizer.main_params_dtype")
        .help("set optimizer.stochastic_rounding=true, or optimizer.main_params_dtype=fp32");
  if (o.main_grads_dtype == Precision::fp16)
    report.error("`optimizer.main_grads_dtype` fp16 overflows")
        .at("optimizer.main_grads_dtype")
        .help("legal values: fp32, bf16");
  else if (o.main_grads_dtype == Precision::bf16 && c.mixed_precision.params_dtype != Precision::bf16)
    report
        .error(
            "`optimizer.main_grads_dtype` bf16 is for a model in bf16, `mixed_precision.params_dtype` is " +
            name_of(c.mixed_precision.params_dtype))
        .at("optimizer.main_grads_dtype")
        .help("set mixed_precision=bf16_mixed, or optimizer.main_grads_dtype=fp32");
}

// Each micro-batch then adds less than 4 units in the last place of the sum.
constexpr int64_t kMaxBf16MicroBatches = 64;

RULE("R0517", bf16_gradients_of_few_micro_batches,
     "main_grads_dtype bf16 loses precision with more than 64 micro-batches", "optimizer.main_grads_dtype",
     "train.num_microbatches") {
  const int64_t micro_batches = c.train.num_microbatches.value_or(0);
  if (c.optimizer.main_grads_dtype != Precision::bf16 || micro_batches <= kMaxBf16MicroBatches) return;
  report
      .warning("`optimizer.main_grads_dtype` bf16: the sums of " + to_text(micro_batches) +
               " micro-batches are rounded to 8 significant bits after each of them")
      .help("set optimizer.main_grads_dtype=fp32, or a larger train.micro_batch_size");
}

RULE("R0515", precision_aware_stores_below_fp32,
     "use_precision_aware_optimizer has an effect only if one of its data types is below fp32",
     "optimizer.use_precision_aware_optimizer", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype",
     "optimizer.main_params_dtype", "optimizer.main_grads_dtype") {
  const auto& o = c.optimizer;
  if (!o.use_precision_aware_optimizer || o.exp_avg_dtype != MomentType::fp32 ||
      o.exp_avg_sq_dtype != MomentType::fp32 || o.main_params_dtype != Precision::fp32 ||
      o.main_grads_dtype != Precision::fp32)
    return;
  report.warning("`optimizer.use_precision_aware_optimizer` has no effect: all four formats are fp32")
      .help("set optimizer.exp_avg_dtype=bf16, or optimizer.use_precision_aware_optimizer=false");
}

}  // namespace

}  // namespace capstan::config
