// Llama 2, 3, 3.1 and 3.2, SmolLM2, and other models of type `llama`.
#include "formats/family.hpp"

namespace capstan::formats {

static constexpr LlamaLike kLlamaKeys{.attention_bias = true, .mlp_bias = true};

static void read_llama(ConfigJson& c, config::ModelConfig& m) {
  read_llama_like(c, m, kLlamaKeys);
}

static void write_llama(const config::ModelConfig& m, OrderedJson& j) {
  write_llama_like(m, j, kLlamaKeys);
}

extern const Family kLlama;
const Family kLlama = {"llama", "LlamaForCausalLM", read_llama, write_llama, llama_names(), ""};

}  // namespace capstan::formats
