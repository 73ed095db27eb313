// Qwen 2 and 2.5: Llama with biases on q, k and v.
#include "formats/families/qwen.hpp"

namespace capstan::formats {

static void read_qwen2(ConfigJson& c, config::ModelConfig& m) {
  m.add_qkv_bias = true;
  read_qwen_windows(c, m);
}

extern const Family kQwen2;
const Family kQwen2 = {.model_type = "qwen2",
                       .architecture = "Qwen2ForCausalLM",
                       .like = LlamaLike{.groups = 32},
                       .read_rest = read_qwen2,
                       .write_rest = write_qwen_windows,
                       .names = llama_names()};

}  // namespace capstan::formats
