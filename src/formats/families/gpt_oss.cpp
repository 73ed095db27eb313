// gpt-oss: experts with biases and a limited SwiGLU in every layer, attention sinks, a window in every second
// layer.
#include "formats/families/moe.hpp"

namespace capstan::formats {

namespace {

// The factor inside the sigmoid, which is that of the quick GELU.
constexpr double kAlpha = 1.702;

// The weights of the releases, which are dequantized where they are read (mxfp4_weights.hpp).
void read_mxfp4(ConfigJson& c) {
  const Json& given = c.value("quantization_config");
  if (given.is_null()) return;
  ConfigJson q(given, c.location() + ": quantization_config");
  q.only("quant_method", "mxfp4", "only MXFP4 weights are read");
  q.changes_nothing({"modules_to_not_convert", "dequantize"});
  q.finish();
}

// What the class takes where config.json has no scaling of RoPE.
void set_yarn_of_class(config::ModelConfig& m) {
  m.rope_scaling = true;
  m.rope_scaling_type = config::RopeScaling::yarn;
  m.rope_scaling_factor = 32;
  m.rope_scaling_beta_fast = 32;
  m.rope_scaling_beta_slow = 1;
  m.rope_scaling_truncate = false;
  m.rope_scaling_original_max_position_embeddings = 4096;
}

void read_layers(ConfigJson& c, config::ModelConfig& m) {
  const std::optional<int64_t> window = read_window(c, 128);
  std::vector<std::string> types = c.texts("layer_types");
  if (types.empty())
    for (int64_t layer = 0; layer < m.num_layers; ++layer)
      types.emplace_back(layer % 2 == 0 ? "sliding_attention" : "full_attention");
  read_layer_types(c, m, window, std::move(types));
}

// The releases have a large coefficient of the load-balancing loss, which the class adds on demand only.
void read_balance(ConfigJson& c, config::ModelConfig& m) {
  const bool balances = c.boolean("output_router_logits", false);
  read_balance_coefficient(c, m, "router_aux_loss_coef", 0.001);
  if (balances) return;
  m.moe_aux_loss_coeff = 0;
  m.moe_router_load_balancing_type = config::RouterBalancing::none;
}

void read_gpt_oss(ConfigJson& c, config::ModelConfig& m) {
  if (m.activation_func != config::Activation::silu) c.refuse("`hidden_act` is not silu");
  m.activation_func = config::Activation::quick_gelu;
  c.only("swiglu_alpha", kAlpha, "the gate's sigmoid has the factor of the quick GELU");
  m.activation_func_clamp_value = c.number("swiglu_limit", 7.0);
  if (!(*m.activation_func_clamp_value > 0))
    c.refuse("`swiglu_limit` is " + to_text(*m.activation_func_clamp_value) + ", not above 0");
  m.glu_linear_offset = 1;
  m.softmax_type = config::SoftmaxType::learnable;
  m.add_qkv_bias = c.boolean("attention_bias", true);
  m.add_attention_output_bias = m.add_qkv_bias;
  m.add_mlp_bias = true;
  m.num_moe_experts = c.integer("num_local_experts", c.integer("num_experts", 128, kMaxExperts), kMaxExperts);
  read_topk(c, m, c.integer("experts_per_token", 4, kMaxExperts));
  if (c.has("experts_per_token") && c.integer("experts_per_token") != m.moe_router_topk)
    c.refuse("`experts_per_token` and `num_experts_per_tok` differ");
  read_balance(c, m);
  read_layers(c, m);
  read_mxfp4(c);
  if (c.value("rope_parameters").is_null() && c.value("rope_scaling").is_null()) set_yarn_of_class(m);
  c.changes_nothing({"initial_context_length"});
}

void write_gpt_oss(const config::ModelConfig& m, OrderedJson& j) {
  j["hidden_act"] = "silu";
  j["swiglu_alpha"] = kAlpha;
  j["swiglu_limit"] = m.activation_func_clamp_value.value_or(7);
  j["attention_bias"] = m.add_qkv_bias;
  j["sliding_window"] = or_null(m.window_size);
  write_layer_types(m, j);
  write_experts(m, j, "num_local_experts");
  write_expert_width(m, j);
  if (!m.rope_scaling) j["rope_scaling"] = {{"rope_type", "default"}};
}

TensorNames gpt_oss_names() {
  TensorNames n = llama_names();
  n.gate = n.up = n.down = "";
  n.sinks = "self_attn.sinks";
  n.router = "mlp.router";
  n.experts_gate_up = "mlp.experts.gate_up_proj";
  n.experts_gate_up_bias = "mlp.experts.gate_up_proj_bias";
  n.experts_down = "mlp.experts.down_proj";
  n.experts_down_bias = "mlp.experts.down_proj_bias";
  return n;
}

}  // namespace

extern const Family kGptOss;
const Family kGptOss = {
    .model_type = "gpt_oss",
    .architecture = "GptOssForCausalLM",
    .like = LlamaLike{.epsilon = 1e-5, .groups = 8, .head = 64, .rope = {.class_base = 150000}},
    .read_rest = read_gpt_oss,
    .write_rest = write_gpt_oss,
    .names = gpt_oss_names()};

}  // namespace capstan::formats
