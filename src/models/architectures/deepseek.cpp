// Latent attention, then an MLP or a mixture of experts: DeepSeek-V2 and V3, Moonlight, Kimi K2.
#include "models/architectures/architecture.hpp"
#include "models/architectures/experts.hpp"
#include "models/architectures/options.hpp"
#include "nn/latent_attention.hpp"

namespace capstan::models {

using config::ModelConfig;

static void check_deepseek(const ModelConfig& c) {
  require(c.position_embedding_type == config::PositionEmbedding::rope,
          "model.multi_latent_attention=true needs model.position_embedding_type=rope");
  require(c.kv_lora_rank > 0 && c.q_lora_rank.value_or(1) > 0 && c.qk_head_dim > 0 && c.v_head_dim > 0,
          "model.multi_latent_attention=true needs model.q_lora_rank, kv_lora_rank, qk_head_dim and "
          "v_head_dim above 0");
  check_experts(c);
}

static std::unique_ptr<nn::DecoderLayer> make_deepseek_layer(nn::ParamList& parameters,
                                                             const nn::ModulePath& path, const ModelConfig& c,
                                                             int64_t index) {
  nn::Attention::Options attention = attention_options(c, index);
  if (attention.qk_norm)
    attention.qk_norm->epsilon = resolved(c.latent_layernorm_epsilon, "latent_layernorm_epsilon");
  const nn::LatentAttention::Sizes sizes{
      .q_rank = c.q_lora_rank,
      .kv_rank = c.kv_lora_rank,
      .nope_dim = c.qk_head_dim,
      .value_dim = c.v_head_dim,
      .recompute_up_projections = recomputes(c, config::RecomputeModule::mla_up_proj)};
  nn::TransformerLayer::Options options = transformer_layer_options(c);
  options.attention = [&](nn::ParamList& list, const nn::ModulePath& at) {
    return std::make_unique<nn::LatentAttention>(list, at, attention, sizes);
  };
  use_experts(options, c, index);
  return std::make_unique<nn::TransformerLayer>(parameters, path, options);
}

extern const Architecture kDeepseek;
const Architecture kDeepseek = {
    .name = config::Architecture::deepseek, .check = check_deepseek, .make_layer = make_deepseek_layer};

}  // namespace capstan::models
