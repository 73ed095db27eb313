// Qwen 2 and 2.5: Llama with biases on q, k and v.
#include "formats/families/qwen.hpp"

namespace capstan::formats {

static constexpr LlamaLike kQwen2Keys{.groups = 32};

static void read_qwen2(ConfigJson& c, config::ModelConfig& m) {
  read_llama_like(c, m, kQwen2Keys);
  m.add_qkv_bias = true;
  read_qwen_windows(c, m);
}

static void write_qwen2(const config::ModelConfig& m, OrderedJson& j) {
  write_llama_like(m, j, kQwen2Keys);
  write_qwen_windows(m, j);
}

extern const Family kQwen2;
const Family kQwen2 = {"qwen2", "Qwen2ForCausalLM", read_qwen2, write_qwen2, llama_names(), ""};

}  // namespace capstan::formats
