// DeepSeek V2 and V3, and Kimi K2, a V3 of other sizes: Llama with latent attention and experts.
#include <algorithm>

#include "base/checked.hpp"
#include "formats/families/moe.hpp"
#include "formats/fp8_weights.hpp"

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

// Defaults of a class for keys that config.json lacks; topk nullopt: the key is required.
struct ExpertDefaults {
  int64_t experts, shared, width;
  std::optional<int64_t> topk;
  double scaling;
};

// Reads `first_k_dense_replace`. False: all layers are dense, and the keys of experts change nothing.
bool read_number_of_dense_layers(ConfigJson& c, config::ModelConfig& m, int64_t otherwise) {
  // Layers for multi-token prediction, which the class with the head does not run. The recipe says whether
  // they are trained.
  c.changes_nothing({kPredictionLayers, "num_mtp_layers", "ep_size", "output_router_logits"});
  const Json& given = c.value("first_k_dense_replace");
  const Json count = given.is_null() ? Json(otherwise) : given;
  if (!count.is_number_integer() || count < 0)
    c.refuse("`first_k_dense_replace` is " + json_excerpt(count) + ", not a number of layers");
  else if (count < m.num_layers) {
    m.moe_first_dense_layers = count.get<int64_t>();
    c.only("moe_layer_freq", 1, "every layer after the dense ones has experts");
    return true;
  }
  c.changes_nothing({"moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts",
                     "num_local_experts", "routed_scaling_factor", "topk_method", "scoring_func", "n_group",
                     "topk_group", "num_experts_per_tok", "moe_layer_freq", "norm_topk_prob",
                     "aux_loss_alpha", "seq_aux"});
  return false;
}

void read_deepseek_experts(ConfigJson& c, config::ModelConfig& m, const ExpertDefaults& otherwise) {
  const int64_t experts = c.integer("n_routed_experts", otherwise.experts, kMaxExperts);
  // Other names of the same attribute.
  for (const char* same : {"num_experts", "num_local_experts"})
    c.only(same, experts, "`n_routed_experts` is another number");
  m.num_moe_experts = experts;
  m.moe_ffn_hidden_size = c.integer("moe_intermediate_size", otherwise.width);
  const int64_t shared = of_class<int64_t>(c, "n_shared_experts", otherwise.shared, 0);
  if (const int64_t count = c.integer("n_shared_experts", shared, kMaxExperts); count > 0)
    m.moe_shared_expert_intermediate_size = checked_mul(count, *m.moe_ffn_hidden_size);
  read_topk(c, m, otherwise.topk);
  const double scaling = c.number("routed_scaling_factor", otherwise.scaling);
  if (!(scaling > 0)) c.refuse("`routed_scaling_factor` is " + to_text(scaling) + ", not above 0");
  if (scaling != 1) m.moe_router_topk_scaling_factor = scaling;
  if (c.boolean("seq_aux", true)) m.moe_router_load_balancing_type = config::RouterBalancing::seq_aux_loss;
  read_balance_coefficient(c, m, "aux_loss_alpha", 0);
}

// best: the scores of a group that the class adds.
void read_groups(ConfigJson& c, config::ModelConfig& m, int64_t groups, int64_t chosen, int64_t best) {
  const int64_t count = c.integer("n_group", groups, kMaxExperts),
                topk = c.integer("topk_group", chosen, kMaxExperts);
  if (*m.num_moe_experts % count != 0 || topk > count || best > *m.num_moe_experts / count ||
      m.moe_router_topk > topk * (*m.num_moe_experts / count))
    return c.refuse("`topk_group` " + std::to_string(topk) + " of `n_group` " + std::to_string(count) +
                    " groups do not fit " + std::to_string(m.moe_router_topk) + " of " +
                    std::to_string(*m.num_moe_experts) + " experts");
  if (count == 1) return;
  m.moe_router_num_groups = count;
  m.moe_router_group_topk = topk;
  m.moe_router_group_score_topk = best;
}

void write_deepseek_experts(const config::ModelConfig& m, OrderedJson& j) {
  j["first_k_dense_replace"] = m.num_moe_experts ? m.moe_first_dense_layers : m.num_layers;
  if (!m.num_moe_experts) return;
  j["moe_layer_freq"] = 1;
  j["n_routed_experts"] = *m.num_moe_experts;
  const int64_t width = *m.moe_ffn_hidden_size, shared = m.moe_shared_expert_intermediate_size.value_or(0);
  j["moe_intermediate_size"] = width;
  j["n_shared_experts"] = shared == 0 ? OrderedJson() : OrderedJson(std::max<int64_t>(1, shared / width));
  j["num_experts_per_tok"] = m.moe_router_topk;
  j["routed_scaling_factor"] = m.moe_router_topk_scaling_factor.value_or(1);
  j["n_group"] = m.moe_router_num_groups.value_or(1);
  j["topk_group"] = m.moe_router_group_topk.value_or(1);
  j["aux_loss_alpha"] = balance_coefficient(m);
  j["seq_aux"] = m.moe_router_load_balancing_type == config::RouterBalancing::seq_aux_loss;
  j["output_router_logits"] = false;
}

void read_v2(ConfigJson& c, config::ModelConfig& m) {
  if (!read_number_of_dense_layers(c, m, 0)) return;
  read_deepseek_experts(c, m,
                        {.experts = 64, .shared = 2, .width = 1407, .topk = std::nullopt, .scaling = 1});
  m.moe_router_pre_softmax = true;
  c.only("scoring_func", "softmax", "the class computes a softmax");
  c.only("norm_topk_prob", false, "the class does not divide the probabilities by their sum");
  const std::string method = c.text("topk_method", "greedy");
  if (method == "greedy")
    c.changes_nothing({"n_group", "topk_group"});
  else if (method == "group_limited_greedy")
    read_groups(c, m, 1, 1, 1);
  else
    c.refuse("`topk_method` is " + in_quotes(method) + "; it is greedy or group_limited_greedy");
}
void write_v2(const config::ModelConfig& m, OrderedJson& j) {
  write_deepseek_experts(m, j);
  if (!m.num_moe_experts) return;
  j["scoring_func"] = "softmax";
  j["topk_method"] = m.moe_router_num_groups ? "group_limited_greedy" : "greedy";
  j["norm_topk_prob"] = false;
}

// The weights of DeepSeek's releases, which are dequantized where they are read (fp8_weights.hpp).
void read_fp8(ConfigJson& c) {
  const Json& given = c.value("quantization_config");
  if (given.is_null()) return;
  ConfigJson q(given, c.location() + ": quantization_config");
  q.only("quant_method", "fp8", "only FP8 weights are read");
  q.only("fmt", "e4m3", "only E4M3 weights are read");
  q.only("weight_block_size", Json::array({kFp8Block, kFp8Block}), "a scale is for a block of 128 x 128");
  // Of the input of GEMMs, which Capstan computes in the type of the recipe.
  q.changes_nothing({"activation_scheme", "modules_to_not_convert"});
  q.finish();
}

void read_v3(ConfigJson& c, config::ModelConfig& m) {
  c.only("rope_interleave", true, "RoPE of the two halves is another model");
  read_fp8(c);
  if (!read_number_of_dense_layers(c, m, 3)) return;
  read_deepseek_experts(c, m, {.experts = 256, .shared = 1, .width = 2048, .topk = 8, .scaling = 2.5});
  m.moe_router_score_function = config::RouterScore::sigmoid;
  m.moe_router_enable_expert_bias = true;
  c.only("scoring_func", "sigmoid", "the class computes a sigmoid");
  c.only("topk_method", "noaux_tc", "the class adds a bias to the scores");
  if (c.boolean("norm_topk_prob", true) != (m.moe_router_topk > 1))
    c.refuse("`norm_topk_prob` is true with one expert of a token, or false with several");
  read_groups(c, m, 8, 4, 2);
}
void write_v3(const config::ModelConfig& m, OrderedJson& j) {
  write_deepseek_experts(m, j);
  j["rope_interleave"] = true;
  // The class has one such layer where the key is missing.
  j[kPredictionLayers] = m.mtp_num_layers.value_or(0);
  if (!m.num_moe_experts) return;
  j["scoring_func"] = "sigmoid";
  j["topk_method"] = "noaux_tc";
  j["norm_topk_prob"] = m.moe_router_topk > 1;
}

TensorNames deepseek_names() {
  TensorNames n = moe_names();
  n.k = n.v = n.k_norm = "";
  n.q_down = "self_attn.q_a_proj";
  n.q_norm = "self_attn.q_a_layernorm";
  n.q_up = "self_attn.q_b_proj";
  n.kv_down = "self_attn.kv_a_proj_with_mqa";
  n.kv_norm = "self_attn.kv_a_layernorm";
  n.kv_up = "self_attn.kv_b_proj";
  n.shared_gate = "mlp.shared_experts.gate_proj";
  n.shared_up = "mlp.shared_experts.up_proj";
  n.shared_down = "mlp.shared_experts.down_proj";
  return n;
}
TensorNames v3_names() {
  TensorNames n = deepseek_names();
  n.expert_bias = "mlp.gate.e_score_correction_bias";
  n.mtp_embedding_norm = "enorm";
  n.mtp_hidden_norm = "hnorm";
  n.mtp_projection = "eh_proj";
  n.mtp_final_norm = "shared_head.norm";
  n.mtp_embedding = "embed_tokens";
  n.mtp_head = "shared_head.head";
  return n;
}

Family v3_family(const char* model_type) {
  return {.model_type = model_type,
          .architecture = "DeepseekV3ForCausalLM",
          .like = LlamaLike{.groups = 128, .read_heads = read_heads, .write_heads = write_heads},
          .read_rest = read_v3,
          .write_rest = write_v3,
          .names = v3_names(),
          .has_prediction_layers = true};
}

}  // namespace

extern const Family kDeepseekV2;
const Family kDeepseekV2 = {
    .model_type = "deepseek_v2",
    .architecture = "DeepseekV2ForCausalLM",
    .like = LlamaLike{.mlp_bias = true, .read_heads = read_heads, .write_heads = write_heads},
    .read_rest = read_v2,
    .write_rest = write_v2,
    .names = deepseek_names()};

extern const Family kDeepseekV3;
const Family kDeepseekV3 = v3_family("deepseek_v3");

extern const Family kKimiK2;
const Family kKimiK2 = v3_family("kimi_k2");

}  // namespace capstan::formats
