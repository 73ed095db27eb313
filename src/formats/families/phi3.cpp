// Phi-3 and Phi-4 mini: Llama with q, k, v in one tensor, and gate and up in another; longrope in the long
// versions.
#include "formats/family.hpp"

namespace capstan::formats {

static void read_phi3(ConfigJson& c, config::ModelConfig& m) {
  const double hidden = c.number("resid_pdrop", 0), embedding = c.number("embd_pdrop", 0);
  if (hidden != embedding) c.refuse("`resid_pdrop` and `embd_pdrop` differ: both are model.hidden_dropout");
  m.hidden_dropout = hidden;
  m.window_size = read_window(c, {});
  c.only("attention_bias", false, "Phi-3 has no biases");
}

static void write_phi3(const config::ModelConfig& m, OrderedJson& j) {
  omit_implied_head_dim(m, j);
  if (m.rope_scaling) j["original_max_position_embeddings"] = m.rope_scaling_original_max_position_embeddings;
  j["resid_pdrop"] = m.hidden_dropout;
  j["embd_pdrop"] = m.hidden_dropout;
  j["sliding_window"] = or_null(m.window_size);
}

static TensorNames phi3_names() {
  TensorNames n = llama_names();
  n.q = n.k = n.v = n.gate = n.up = "";
  n.qkv = "self_attn.qkv_proj";
  n.gate_up = "mlp.gate_up_proj";
  return n;
}

extern const Family kPhi3;
const Family kPhi3 = {
    .model_type = "phi3",
    .architecture = "Phi3ForCausalLM",
    .like = LlamaLike{.epsilon = 1e-5, .rope = {.partial = true, .original_positions = 4096}},
    .read_rest = read_phi3,
    .write_rest = write_phi3,
    .names = phi3_names()};

}  // namespace capstan::formats
