// Qwen 3 (dense): Llama with norms of each head's queries and keys.
#include "formats/families/qwen.hpp"

namespace capstan::formats {

static void read_qwen3(ConfigJson& c, config::ModelConfig& m) {
  m.qk_layernorm = true;
  read_qwen_windows(c, m);
}

static TensorNames qwen3_names() {
  TensorNames n = llama_names();
  n.q_norm = "self_attn.q_norm";
  n.k_norm = "self_attn.k_norm";
  return n;
}

extern const Family kQwen3;
const Family kQwen3 = {.model_type = "qwen3",
                       .architecture = "Qwen3ForCausalLM",
                       .like = LlamaLike{.attention_bias = true, .groups = 32, .head = 128},
                       .read_rest = read_qwen3,
                       .write_rest = write_qwen_windows,
                       .names = qwen3_names()};

}  // namespace capstan::formats
