// Llama 2, 3, 3.1 and 3.2, SmolLM2, and other models of type `llama`.
#include "formats/family.hpp"

namespace capstan::formats {

extern const Family kLlama;
const Family kLlama = {.model_type = "llama",
                       .architecture = "LlamaForCausalLM",
                       .like = LlamaLike{.attention_bias = true, .mlp_bias = true},
                       .names = llama_names()};

}  // namespace capstan::formats
