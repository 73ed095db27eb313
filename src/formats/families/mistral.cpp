// Mistral: Llama with a window on every layer (none from version 0.2 on).
#include "formats/family.hpp"

namespace capstan::formats {

static void read_mistral(ConfigJson& c, config::ModelConfig& m) {
  m.window_size = read_window(c, 4096);
}

static void write_mistral(const config::ModelConfig& m, OrderedJson& j) {
  j["sliding_window"] = or_null(m.window_size);
}

extern const Family kMistral;
const Family kMistral = {.model_type = "mistral",
                         .architecture = "MistralForCausalLM",
                         .like = LlamaLike{.groups = 8},
                         .read_rest = read_mistral,
                         .write_rest = write_mistral,
                         .names = llama_names()};

}  // namespace capstan::formats
