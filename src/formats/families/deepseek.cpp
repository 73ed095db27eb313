// DeepSeek V2 and V3: Llama with latent attention. Layers with experts are refused by name.
#include "formats/family.hpp"

namespace capstan::formats {

namespace {

// The norms of compressed queries, keys and values do not read `rms_norm_eps`.
constexpr double kLatentEpsilon = 1e-6;

void read_heads(ConfigJson& c, config::ModelConfig& m) {
  m.multi_latent_attention = true;
  m.qk_layernorm = true;
  m.latent_layernorm_epsilon = kLatentEpsilon;
  if (c.missing("q_lora_rank"))
    m.q_lora_rank = 1536;
  else if (c.has("q_lora_rank"))
    m.q_lora_rank = c.integer("q_lora_rank");
  m.kv_lora_rank = c.integer("kv_lora_rank", 512);
  m.qk_head_dim = c.integer("qk_nope_head_dim", 128);
  m.qk_pos_emb_head_dim = c.integer("qk_rope_head_dim", 64);
  m.v_head_dim = c.integer("v_head_dim", 128);
  if (m.qk_pos_emb_head_dim % 2 != 0)
    c.refuse("`qk_rope_head_dim` is " + std::to_string(m.qk_pos_emb_head_dim) +
             ", and RoPE rotates pairs of elements");
  // The classes derive both.
  const auto agrees = [&](const char* key, int64_t width) {
    if (c.integer(key, width) != width)
      c.refuse("`" + std::string(key) + "` is not " + std::to_string(width) + ", as the other widths say");
  };
  agrees("qk_head_dim", m.qk_head_dim + m.qk_pos_emb_head_dim);
  agrees("head_dim", m.qk_pos_emb_head_dim);
  if (*m.num_query_groups != m.num_attention_heads)
    c.refuse("`num_key_value_heads` is not `num_attention_heads`, and latent attention has no groups");
}

void write_heads(const config::ModelConfig& m, OrderedJson& j) {
  j["num_key_value_heads"] = m.num_attention_heads;
  j["q_lora_rank"] = or_null(m.q_lora_rank);
  j["kv_lora_rank"] = m.kv_lora_rank;
  j["qk_nope_head_dim"] = m.qk_head_dim;
  j["qk_rope_head_dim"] = m.qk_pos_emb_head_dim;
  j["v_head_dim"] = m.v_head_dim;
  j["qk_head_dim"] = m.qk_head_dim + m.qk_pos_emb_head_dim;
  j["head_dim"] = m.qk_pos_emb_head_dim;
}

// dense: default of `first_k_dense_replace`.
void read_dense_layers(ConfigJson& c, const config::ModelConfig& m, int64_t dense) {
  const Json& given = c.value("first_k_dense_replace");
  const Json count = given.is_null() ? Json(dense) : given;
  if (!count.is_number_integer() || count < m.num_layers)
    c.refuse("`first_k_dense_replace` is below `num_hidden_layers`: layers with experts are not read");
  // Of experts, which no layer has.
  c.changes_nothing({"moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts",
                     "num_local_experts", "ep_size", "routed_scaling_factor", "topk_method", "scoring_func",
                     "n_group", "topk_group", "num_experts_per_tok", "moe_layer_freq", "norm_topk_prob",
                     "aux_loss_alpha", "seq_aux", "output_router_logits"});
  // Layers for multi-token prediction, which the class with the head does not run.
  c.changes_nothing({"num_nextn_predict_layers", "num_mtp_layers"});
}
void read_v2(ConfigJson& c, config::ModelConfig& m) {
  read_dense_layers(c, m, 0);
}
void read_v3(ConfigJson& c, config::ModelConfig& m) {
  c.only("rope_interleave", true, "RoPE of the two halves is another model");
  read_dense_layers(c, m, 3);
}
void write_dense_layers(const config::ModelConfig& m, OrderedJson& j) {
  j["first_k_dense_replace"] = m.num_layers;
}
void write_v3(const config::ModelConfig& m, OrderedJson& j) {
  write_dense_layers(m, j);
  j["rope_interleave"] = true;
}

TensorNames deepseek_names() {
  TensorNames n = llama_names();
  n.k = n.v = "";
  n.q_down = "self_attn.q_a_proj";
  n.q_norm = "self_attn.q_a_layernorm";
  n.q_up = "self_attn.q_b_proj";
  n.kv_down = "self_attn.kv_a_proj_with_mqa";
  n.kv_norm = "self_attn.kv_a_layernorm";
  n.kv_up = "self_attn.kv_b_proj";
  return n;
}

}  // namespace

extern const Family kDeepseekV2;
const Family kDeepseekV2 = {
    .model_type = "deepseek_v2",
    .architecture = "DeepseekV2ForCausalLM",
    .like = LlamaLike{.mlp_bias = true, .read_heads = read_heads, .write_heads = write_heads},
    .read_rest = read_v2,
    .write_rest = write_dense_layers,
    .names = deepseek_names()};

extern const Family kDeepseekV3;
const Family kDeepseekV3 = {
    .model_type = "deepseek_v3",
    .architecture = "DeepseekV3ForCausalLM",
    .like = LlamaLike{.groups = 128, .read_heads = read_heads, .write_heads = write_heads},
    .read_rest = read_v3,
    .write_rest = write_v3,
    .names = deepseek_names()};

}  // namespace capstan::formats
