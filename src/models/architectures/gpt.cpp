// Attention and an MLP in every layer, one after the other: GPT-2, Llama, Mistral, Qwen, Gemma, OLMo 2,
// Phi-3.
#include "models/architectures/architecture.hpp"
#include "models/architectures/options.hpp"

namespace capstan::models {

static std::unique_ptr<nn::DecoderLayer> make_gpt_layer(nn::ParamList& parameters, const nn::ModulePath& path,
                                                        const config::ModelConfig& c, int64_t index) {
  nn::TransformerLayer::Options options = transformer_layer_options(c);
  options.attention = self_attention(c, index);
  return std::make_unique<nn::TransformerLayer>(parameters, path, options);
}

extern const Architecture kGpt;
const Architecture kGpt = {.name = config::Architecture::gpt, .make_layer = make_gpt_layer};

}  // namespace capstan::models
