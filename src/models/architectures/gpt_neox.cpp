// Attention and an MLP side by side in every layer: GPT-NeoX, Pythia, GPT-J's arrangement with two norms.
#include "models/architectures/architecture.hpp"
#include "models/architectures/options.hpp"
#include "nn/parallel_layer.hpp"

namespace capstan::models {

static void check_gpt_neox(const config::ModelConfig& c) {
  require(c.norm_placement == config::NormPlacement::input && !c.apply_residual_connection_post_layernorm,
          "model.architecture=gpt_neox needs model.norm_placement=input and "
          "model.apply_residual_connection_post_layernorm=false");
}

static std::unique_ptr<nn::DecoderLayer> make_gpt_neox_layer(nn::ParamList& parameters,
                                                             const nn::ModulePath& path,
                                                             const config::ModelConfig& c, int64_t index) {
  nn::DecoderLayer::Options options = decoder_layer_options(c);
  options.attention = self_attention(c, index);
  return std::make_unique<nn::ParallelLayer>(parameters, path, options);
}

extern const Architecture kGptNeox;
const Architecture kGptNeox = {
    .name = config::Architecture::gpt_neox, .check = check_gpt_neox, .make_layer = make_gpt_neox_layer};

}  // namespace capstan::models
