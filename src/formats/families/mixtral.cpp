// Mixtral: Mistral with experts in every layer.
#include "formats/families/moe.hpp"

namespace capstan::formats {

static void read_mixtral(ConfigJson& c, config::ModelConfig& m) {
  m.window_size = read_window(c, {});
  read_experts(c, m, 8, 2, 0.001);
  c.only("router_jitter_noise", 0.0, "the noise of Transformers reaches the experts, that of Capstan not");
}

static void write_mixtral(const config::ModelConfig& m, OrderedJson& j) {
  j["sliding_window"] = or_null(m.window_size);
  write_experts(m, j, "num_local_experts");
  write_expert_width(m, j);
}

static TensorNames mixtral_names() {
  TensorNames n = llama_names();
  n.gate = n.up = n.down = "";
  n.router = "block_sparse_moe.gate";
  n.expert_gate = "block_sparse_moe.experts.{}.w1";
  n.expert_up = "block_sparse_moe.experts.{}.w3";
  n.expert_down = "block_sparse_moe.experts.{}.w2";
  return n;
}

extern const Family kMixtral;
const Family kMixtral = {.model_type = "mixtral",
                         .architecture = "MixtralForCausalLM",
                         .like = LlamaLike{.epsilon = 1e-5, .groups = 8, .rope = {.class_base = 1e6}},
                         .read_rest = read_mixtral,
                         .write_rest = write_mixtral,
                         .names = mixtral_names()};

}  // namespace capstan::formats
