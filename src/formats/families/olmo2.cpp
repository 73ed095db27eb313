// OLMo 2: norms of outputs, and of all heads' queries (and keys) as one vector.
#include "formats/family.hpp"

namespace capstan::formats {

static void read_olmo2(ConfigJson&, config::ModelConfig& m) {
  m.norm_placement = config::NormPlacement::output;
  m.qk_layernorm = true;
  m.qk_layernorm_across_heads = true;
}

static TensorNames olmo2_names() {
  TensorNames n = llama_names();
  n.input_norm = n.mlp_norm = "";
  n.post_attention_norm = "post_attention_layernorm";
  n.post_mlp_norm = "post_feedforward_layernorm";
  n.q_norm = "self_attn.q_norm";
  n.k_norm = "self_attn.k_norm";
  return n;
}

extern const Family kOlmo2;
const Family kOlmo2 = {.model_type = "olmo2",
                       .architecture = "Olmo2ForCausalLM",
                       .like = LlamaLike{.attention_bias = true, .epsilon = 1e-5},
                       .read_rest = read_olmo2,
                       .names = olmo2_names()};

}  // namespace capstan::formats
