// OLMoE: experts in every layer, norms of all heads' queries (and keys) as one vector.
#include "formats/families/moe.hpp"

namespace capstan::formats {

static void read_olmoe(ConfigJson& c, config::ModelConfig& m) {
  m.qk_layernorm = true;
  m.qk_layernorm_across_heads = true;
  read_experts(c, m, 64, 8, 0.01);
  read_norm_topk(c, m);
  c.only("clip_qkv", nullptr, "queries, keys and values are not clipped");
}

static void write_olmoe(const config::ModelConfig& m, OrderedJson& j) {
  omit_implied_head_dim(m, j);
  write_experts(m, j, "num_experts");
  write_expert_width(m, j);
  write_norm_topk(m, j);
}

extern const Family kOlmoe;
const Family kOlmoe = {.model_type = "olmoe",
                       .architecture = "OlmoeForCausalLM",
                       .like = LlamaLike{.attention_bias = true, .epsilon = 1e-5},
                       .read_rest = read_olmoe,
                       .write_rest = write_olmoe,
                       .names = moe_names()};

}  // namespace capstan::formats
