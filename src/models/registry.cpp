#include "models/registry.hpp"

#include <algorithm>

#include "config/sections/architecture.hpp"
#include "models/decoder_model.hpp"

namespace capstan::models {

std::span<const Architecture* const> all_architectures() {
  extern const Architecture kGpt, kMoe, kDeepseek, kGptNeox;
  static const Architecture* const architectures[] = {&kGpt, &kMoe, &kDeepseek, &kGptNeox};
  return architectures;
}

std::unique_ptr<Model> build(const config::ModelConfig& config, const ModelShard& shard) {
  const config::Architecture name = config::architecture_of(config);
  if (const std::string conflict = config::architecture_conflict(config); !conflict.empty())
    fail(ErrorCode::config,
         "`model.architecture` is " + std::string(config::enum_name(name)) + ", but " + conflict);
  const auto all = all_architectures();
  const auto found = std::ranges::find(all, name, [](const Architecture* one) { return one->name; });
  CAPSTAN_ASSERT(found != all.end(), "no architecture " + std::string(config::enum_name(name)));
  return std::make_unique<DecoderModel>(**found, config, shard);
}

}  // namespace capstan::models
