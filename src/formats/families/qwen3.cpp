// Qwen 3 (dense): Llama with norms of each head's queries and keys.
#include "formats/families/qwen.hpp"

namespace capstan::formats {

static constexpr LlamaLike kQwen3Keys{.attention_bias = true, .groups = 32, .head = 128};

static void read_qwen3(ConfigJson& c, config::ModelConfig& m) {
  read_llama_like(c, m, kQwen3Keys);
  m.qk_layernorm = true;
  read_qwen_windows(c, m);
}

static void write_qwen3(const config::ModelConfig& m, OrderedJson& j) {
  write_llama_like(m, j, kQwen3Keys);
  write_qwen_windows(m, j);
}

static TensorNames qwen3_names() {
  TensorNames n = llama_names();
  n.q_norm = "self_attn.q_norm";
  n.k_norm = "self_attn.k_norm";
  return n;
}

extern const Family kQwen3;
const Family kQwen3 = {"qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3, qwen3_names(), ""};

}  // namespace capstan::formats
