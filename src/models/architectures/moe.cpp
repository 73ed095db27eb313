// Attention, then a mixture of experts, in some layers an MLP: Mixtral, Qwen-MoE, OLMoE, gpt-oss.
#include "models/architectures/architecture.hpp"
#include "models/architectures/experts.hpp"
#include "models/architectures/options.hpp"

namespace capstan::models {

static std::unique_ptr<nn::DecoderLayer> make_moe_layer(nn::ParamList& parameters, const nn::ModulePath& path,
                                                        const config::ModelConfig& c, int64_t index) {
  nn::TransformerLayer::Options options = transformer_layer_options(c);
  options.attention = self_attention(c, index);
  use_experts(options, c, index);
  return std::make_unique<nn::TransformerLayer>(parameters, path, options);
}

extern const Architecture kMoe;
const Architecture kMoe = {
    .name = config::Architecture::moe, .check = check_experts, .make_layer = make_moe_layer};

}  // namespace capstan::models
