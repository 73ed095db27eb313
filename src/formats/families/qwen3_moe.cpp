// Qwen 3 with experts, in all layers but the first dense ones.
#include "formats/families/moe.hpp"

namespace capstan::formats {

// The window is on every layer, whatever `max_window_layers`.
static void read_window_of_all(ConfigJson& c, config::ModelConfig& m) {
  const std::optional<int64_t> window = read_window(c, 4096);
  if (c.boolean("use_sliding_window", false)) m.window_size = window;
  c.changes_nothing({"max_window_layers"});
}

static void read_qwen3_moe(ConfigJson& c, config::ModelConfig& m) {
  m.qk_layernorm = true;
  read_window_of_all(c, m);
  read_experts(c, m, 128, 8, 0.001);
  read_norm_topk(c, m);
  m.moe_ffn_hidden_size = c.integer("moe_intermediate_size", 768);
  read_dense_layers(c, m);
}

static void write_qwen3_moe(const config::ModelConfig& m, OrderedJson& j) {
  j["use_sliding_window"] = m.window_size.has_value();
  j["sliding_window"] = or_null(m.window_size);
  write_experts(m, j, "num_experts");
  write_norm_topk(m, j);
  write_dense_layers(m, j);
}

extern const Family kQwen3Moe;
const Family kQwen3Moe = {.model_type = "qwen3_moe",
                          .architecture = "Qwen3MoeForCausalLM",
                          .like = LlamaLike{.attention_bias = true, .groups = 4},
                          .read_rest = read_qwen3_moe,
                          .write_rest = write_qwen3_moe,
                          .names = moe_names()};

}  // namespace capstan::formats
