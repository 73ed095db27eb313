// Qwen 2 and 1.5 with experts, of which a shared one has a gate.
#include "formats/families/moe.hpp"

namespace capstan::formats {

static void read_qwen2_moe(ConfigJson& c, config::ModelConfig& m) {
  m.add_qkv_bias = c.boolean("qkv_bias", true);
  c.only("use_sliding_window", false, "Transformers chooses other layers for the window in each version");
  c.changes_nothing({"sliding_window", "max_window_layers", "layer_types"});
  read_experts(c, m, 60, 4, 0.001);
  read_norm_topk(c, m);
  m.moe_ffn_hidden_size = c.integer("moe_intermediate_size", 1408);
  m.moe_shared_expert_intermediate_size = c.integer("shared_expert_intermediate_size", 5632);
  m.moe_shared_expert_gate = true;
  read_dense_layers(c, m);
}

static void write_qwen2_moe(const config::ModelConfig& m, OrderedJson& j) {
  omit_implied_head_dim(m, j);
  j["qkv_bias"] = m.add_qkv_bias;
  j["use_sliding_window"] = false;
  write_experts(m, j, "num_experts");
  write_norm_topk(m, j);
  if (m.moe_shared_expert_intermediate_size)
    j["shared_expert_intermediate_size"] = *m.moe_shared_expert_intermediate_size;
  write_dense_layers(m, j);
}

static TensorNames qwen2_moe_names() {
  TensorNames n = moe_names();
  n.q_norm = n.k_norm = "";
  n.shared_gate = "mlp.shared_expert.gate_proj";
  n.shared_up = "mlp.shared_expert.up_proj";
  n.shared_down = "mlp.shared_expert.down_proj";
  n.shared_expert_gate = "mlp.shared_expert_gate";
  return n;
}

extern const Family kQwen2Moe;
const Family kQwen2Moe = {.model_type = "qwen2_moe",
                          .architecture = "Qwen2MoeForCausalLM",
                          .like = LlamaLike{.groups = 16},
                          .read_rest = read_qwen2_moe,
                          .write_rest = write_qwen2_moe,
                          .names = qwen2_moe_names()};

}  // namespace capstan::formats
