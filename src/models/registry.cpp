#include "models/registry.hpp"

#include "models/gpt.hpp"

namespace capstan::models {

// Each model family is one file pair, and a condition on the section here. There is one family so far.
std::unique_ptr<Model> build(const config::ModelConfig& config, const ModelShard& shard) {
  return std::make_unique<GptModel>(config, shard);
}

}  // namespace capstan::models
