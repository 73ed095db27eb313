#include "config/sections/architecture.hpp"

#include "base/text.hpp"

namespace capstan::config {

Architecture derived_architecture(const ModelConfig& model) {
  if (model.multi_latent_attention) return Architecture::deepseek;
  return model.num_moe_experts ? Architecture::moe : Architecture::gpt;
}

std::string architecture_conflict(const ModelConfig& model) {
  const Architecture named = architecture_of(model);
  if ((named == Architecture::deepseek) != model.multi_latent_attention)
    return model.multi_latent_attention ? "`model.multi_latent_attention` is true"
                                        : "`model.multi_latent_attention` is false";
  if (named == Architecture::moe && !model.num_moe_experts) return "`model.num_moe_experts` is not set";
  if ((named == Architecture::gpt || named == Architecture::gpt_neox) && model.num_moe_experts)
    return "`model.num_moe_experts` is " + to_text(*model.num_moe_experts);
  return "";
}

}  // namespace capstan::config
