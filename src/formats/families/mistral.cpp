// Mistral: Llama with a window on every layer (none from version 0.2 on).
#include "formats/family.hpp"

namespace capstan::formats {

static constexpr LlamaLike kMistralKeys{.groups = 8};

static void read_mistral(ConfigJson& c, config::ModelConfig& m) {
  read_llama_like(c, m, kMistralKeys);
  m.window_size = read_window(c, 4096);
}

static void write_mistral(const config::ModelConfig& m, OrderedJson& j) {
  write_llama_like(m, j, kMistralKeys);
  j["sliding_window"] = m.window_size ? OrderedJson(*m.window_size) : nullptr;
}

extern const Family kMistral;
const Family kMistral = {"mistral", "MistralForCausalLM", read_mistral, write_mistral, llama_names(), ""};

}  // namespace capstan::formats
