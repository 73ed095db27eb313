#include "models/registry.hpp"

#include "base/error.hpp"
#include "models/gpt.hpp"

namespace capstan::models {

namespace {

// A family is one file pair and one line here; the first that takes the section builds it.
struct Family {
  bool (*takes)(const config::ModelConfig&);
  std::unique_ptr<Model> (*build)(const config::ModelConfig&, const ModelShard&);
};
constexpr Family kFamilies[] = {
    {&GptModel::takes,
     [](const config::ModelConfig& config, const ModelShard& part) -> std::unique_ptr<Model> {
       return std::make_unique<GptModel>(config, part);
     }},
};

}  // namespace

std::unique_ptr<Model> build(const config::ModelConfig& config, const ModelShard& part) {
  for (const Family& family : kFamilies)
    if (family.takes(config)) return family.build(config, part);
  fail(ErrorCode::unsupported, "no model family takes this model section");
}

}  // namespace capstan::models
