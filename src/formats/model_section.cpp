#include "formats/model_section.hpp"

#include <algorithm>
#include <cmath>

#include "config/core/emit.hpp"
#include "config/core/field.hpp"
#include "config/sections/config.hpp"
#include "config/sections/moe_layers.hpp"

namespace capstan::formats {

using config::FieldInfo;
using config::ModelConfig;
using config::Value;

void fill_in(ModelConfig& model) {
  config::Config holder;
  holder.model = model;
  for (const auto& derivation : config::schema().derivations()) {
    const FieldInfo* field = config::schema().find_field(derivation.path);
    if (field && field->section == "model" && config::schema().load(&holder, *field).is_null())
      derivation.run(&holder);
  }
  model = holder.model;
}

namespace {

constexpr std::string_view kOfTraining[] = {"seq_length",
                                            "make_vocab_size_divisible_by",
                                            "padded_vocab_size",
                                            "hidden_dropout",
                                            "attention_dropout",
                                            "init_method_std",
                                            "embedding_init_method_std",
                                            "recompute_granularity",
                                            "recompute_method",
                                            "recompute_num_layers",
                                            "recompute_modules",
                                            "distribute_saved_activations",
                                            "cpu_offloading",
                                            "cpu_offloading_num_layers",
                                            "attention_softmax_in_fp32",
                                            "fp32_residual_connection",
                                            "moe_router_dtype",
                                            "moe_router_bias_update_rate",
                                            "moe_router_load_balancing_type",
                                            "moe_aux_loss_coeff",
                                            "moe_z_loss_coeff",
                                            "moe_input_jitter_eps",
                                            "moe_expert_capacity_factor",
                                            "moe_pad_expert_input_to_capacity",
                                            "moe_token_drop_policy",
                                            "moe_token_dispatcher_type",
                                            "moe_grouped_gemm",
                                            "moe_permute_fusion",
                                            "cross_entropy_loss_fusion",
                                            "moe_shared_expert_overlap",
                                            "mtp_num_layers",
                                            "mtp_loss_scaling_factor",
                                            "add_bias_linear",
                                            "add_qkv_bias",
                                            "apply_residual_connection_post_layernorm"};

bool alike(const Value& a, const Value& b) {
  if (a.kind == Value::Kind::real && b.kind == Value::Kind::real)
    return std::abs(a.real - b.real) <= 1e-12 * std::max(std::abs(a.real), std::abs(b.real));
  if (a.kind == Value::Kind::list && b.kind == Value::Kind::list)
    return std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), alike);
  return a == b;
}

bool counts(const FieldInfo& field, const config::Config& holder) {
  if (std::ranges::find(kOfTraining, field.name) != std::end(kOfTraining)) return false;
  return std::all_of(field.used_when.begin(), field.used_when.end(),
                     [&](const auto& condition) { return condition.holds(&holder); });
}

}  // namespace

std::vector<Difference> differences(const ModelConfig& first, const ModelConfig& second) {
  config::Config a, b;
  a.model = first;
  b.model = second;
  std::vector<Difference> result;
  for (const FieldInfo* field : config::schema().fields()) {
    if (field->section != "model" || (!counts(*field, a) && !counts(*field, b))) continue;
    // No dense layer has this width.
    if (field->name == "ffn_hidden_size" && config::every_layer_has_experts(first) &&
        config::every_layer_has_experts(second))
      continue;
    const bool of_layers = field->name == "moe_layer_freq" || field->name == "moe_first_dense_layers";
    if (of_layers && config::moe_layers(first) == config::moe_layers(second)) continue;
    const Value x = config::schema().load(&a, *field), y = config::schema().load(&b, *field);
    if (!alike(x, y))
      result.push_back(
          {field->path, config::yaml_inline(*field->type, x), config::yaml_inline(*field->type, y)});
  }
  // Fields that determine which linear layers have biases, and whether the residual is taken after the norm.
  const auto add = [&](const char* path, bool x, bool y) {
    if (x != y) result.push_back({path, x ? "true" : "false", y ? "true" : "false"});
  };
  add("model.add_qkv_bias", first.add_qkv_bias || first.add_bias_linear,
      second.add_qkv_bias || second.add_bias_linear);
  add("model.apply_residual_connection_post_layernorm", first.apply_residual_connection_post_layernorm,
      second.apply_residual_connection_post_layernorm);
  return result;
}

namespace {

// Returns true if the field would have this value without being written, for any sequence length of a run.
bool derived(const ModelConfig& model, const FieldInfo& field, const Value& value) {
  if (!field.type->optional || !config::schema().find_derivation(field.path)) return false;
  const auto follows = [&](int64_t seq_length) {
    config::Config holder;
    holder.model = model;
    holder.model.seq_length = seq_length;
    config::schema().store(&holder, field, Value());
    fill_in(holder.model);
    return alike(config::schema().load(&holder, field), value);
  };
  return follows(model.seq_length) && follows(model.seq_length + 1);
}

}  // namespace

std::string section_text(const ModelConfig& model) {
  config::Config holder, plain;
  holder.model = model;
  std::string text;
  for (const FieldInfo* field : config::schema().fields()) {
    if (field->section != "model") continue;
    const Value value = config::schema().load(&holder, *field);
    if (value != config::schema().load(&plain, *field) && !derived(model, *field, value))
      text += field->name + ": " + config::yaml_inline(*field->type, value) + "\n";
  }
  return text;
}

}  // namespace capstan::formats
