#include "models/registry.hpp"

#include "base/error.hpp"
#include "models/gpt.hpp"

namespace capstan::models {

namespace {

// Each model family is one file pair and one line here. The first family that supports the section builds the
// model.
struct Family {
  bool (*supports)(const config::ModelConfig&);
  std::unique_ptr<Model> (*build)(const config::ModelConfig&, const ModelShard&);
};
constexpr Family kFamilies[] = {
    {&GptModel::supports,
     [](const config::ModelConfig& config, const ModelShard& shard) -> std::unique_ptr<Model> {
       return std::make_unique<GptModel>(config, shard);
     }},
};

}  // namespace

std::unique_ptr<Model> build(const config::ModelConfig& config, const ModelShard& shard) {
  for (const Family& family : kFamilies)
    if (family.supports(config)) return family.build(config, shard);
  fail(ErrorCode::unsupported, "no model family supports this model section");
}

}  // namespace capstan::models
