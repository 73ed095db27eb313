#include "models/registry.hpp"

#include "base/error.hpp"
#include "models/gpt.hpp"

namespace capstan::models {

namespace {

// A family is one file pair and one line here; the first that takes the section builds it.
struct Family {
  bool (*takes)(const config::ModelConfig&);
  std::unique_ptr<Model> (*build)(const config::ModelConfig&);
};
constexpr Family kFamilies[] = {
    {&GptModel::takes,
     [](const config::ModelConfig& config) -> std::unique_ptr<Model> {
       return std::make_unique<GptModel>(config);
     }},
};

}  // namespace

std::unique_ptr<Model> build(const config::ModelConfig& config) {
  for (const Family& family : kFamilies)
    if (family.takes(config)) return family.build(config);
  fail(ErrorCode::unsupported, "no model family takes this model section");
}

}  // namespace capstan::models
