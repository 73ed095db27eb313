#include "capstan/generate.hpp"

#include "api/config_impl.hpp"
#include "base/error.hpp"
#include "train/inference/evaluate.hpp"
#include "train/inference/generate.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan {

struct Model::Impl {
  std::unique_ptr<comm::World> world;
  std::unique_ptr<train::LoadedModel> loaded;
};

Model Model::load(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  const train::StoredRecipe stored = train::stored_recipe(path.string(), overrides_of(overrides), 1);
  try {
    stored.resolution.require_ok();
  } catch (Error& error) {
    throw error.in("in the recipe of checkpoint `" + stored.checkpoint.string() + "`");
  }
  auto impl = std::make_shared<Impl>();
  impl->world = comm::World::alone();
  impl->loaded =
      std::make_unique<train::LoadedModel>(stored.checkpoint, stored.resolution.config, *impl->world);
  return Model(std::move(impl));
}

Generated Model::generate(const std::string& prompt, const GenerateOptions& options,
                          const std::function<void(const std::string& text)>& on_text) {
  Generated generated;
  train::GenerateOptions request;
  request.prompt = prompt;
  request.max_tokens = options.max_tokens;
  request.temperature = options.temperature;
  request.top_k = options.top_k;
  request.top_p = options.top_p;
  request.seed = options.seed;
  request.stop_at_eod = options.stop_at_eod;
  request.on_text = [&](const std::string& text) {
    generated.text += text;
    if (on_text) on_text(text);
  };
  const train::GenerateResult result = train::generate(*impl_->loaded, request);
  generated.prompt_tokens = result.prompt_tokens;
  generated.tokens = result.tokens;
  generated.ended = result.ended;
  generated.prompt_seconds = result.prompt_seconds;
  generated.seconds = result.seconds;
  return generated;
}

TextLoss Model::loss(const std::string& text, int64_t stride) {
  if (stride < 0) fail(ErrorCode::usage, "a stride of " + std::to_string(stride) + " tokens is negative");
  train::EvalOptions request;
  request.text = text;
  request.stride = stride;
  const train::EvalResult result = train::evaluate_text(*impl_->loaded, request);
  return {result.loss, result.perplexity, result.bits_per_byte, result.tokens};
}

}  // namespace capstan
