// The model presets have as many parameters as the models that they are named after.
#include <doctest/doctest.h>

#include <set>

#include "config/resolve/resolve.hpp"
#include "models/registry.hpp"

using namespace capstan;

namespace {

// As published: without rows of padding, a tied head once; with the bias of experts, which is a parameter in
// the files of DeepSeek's models.
const std::pair<const char*, int64_t> kPublished[] = {
    {"gpt2-124m", 124'439'808},           {"gpt2-355m", 354'823'168},
    {"gpt2-774m", 774'030'080},           {"gpt2-1.5b", 1'557'611'200},
    {"llama2-7b", 6'738'415'616},         {"llama2-13b", 13'015'864'320},
    {"llama2-70b", 68'976'648'192},       {"llama3-8b", 8'030'261'248},
    {"llama3-70b", 70'553'706'496},       {"llama3.1-8b", 8'030'261'248},
    {"llama3.1-70b", 70'553'706'496},     {"llama3.1-405b", 405'853'388'800},
    {"llama3.2-1b", 1'235'814'400},       {"llama3.2-3b", 3'212'749'824},
    {"smollm2-135m", 134'515'008},        {"smollm2-360m", 361'821'120},
    {"smollm2-1.7b", 1'711'376'384},      {"mistral-7b", 7'248'023'552},
    {"mistral-7b-v0.1", 7'241'732'096},   {"qwen2.5-0.5b", 494'032'768},
    {"qwen2.5-1.5b", 1'543'714'304},      {"qwen2.5-3b", 3'085'938'688},
    {"qwen2.5-7b", 7'615'616'512},        {"qwen2.5-14b", 14'770'033'664},
    {"qwen2.5-32b", 32'763'876'352},      {"qwen3-0.6b", 596'049'920},
    {"qwen3-1.7b", 1'720'574'976},        {"qwen3-4b", 4'022'468'096},
    {"qwen3-8b", 8'190'735'360},          {"qwen3-14b", 14'768'307'200},
    {"qwen3-32b", 32'762'123'264},        {"olmo2-1b", 1'484'916'736},
    {"olmo2-7b", 7'298'617'344},          {"olmo2-13b", 13'716'198'400},
    {"gemma2-2b", 2'614'341'888},         {"gemma2-9b", 9'241'705'984},
    {"gemma2-27b", 27'227'128'320},       {"phi3-mini", 3'821'079'552},
    {"phi3.5-mini", 3'821'079'552},       {"mixtral-8x7b", 46'702'792'704},
    {"mixtral-8x22b", 140'620'634'112},   {"qwen3-30b-a3b", 30'532'122'624},
    {"qwen3-235b-a22b", 235'093'634'560}, {"olmoe-1b-7b", 6'919'161'856},
    {"deepseek-v2-lite", 15'706'484'224}, {"deepseek-v2", 235'741'434'880},
    {"pythia-160m", 162'322'944},         {"pythia-1.4b", 1'414'647'808},
    {"deepseek-v3", 671'026'419'200},     {"moonlight-16b-a3b", 15'960'110'208},
    {"kimi-k2", 1'026'408'232'448},       {"gpt-oss-20b", 20'914'757'184},
    {"gpt-oss-120b", 116'829'156'672},
};

}  // namespace

TEST_CASE("the layer for multi-token prediction of DeepSeek-V3 has the published number of parameters") {
  config::Request request;
  request.recipe = "quickstart";
  request.unset = {"model"};
  request.overrides = {config::Override::token("model=deepseek-v3"),
                       config::Override::token("model.mtp_num_layers=1")};
  const config::Resolution recipe = config::resolve(request);
  REQUIRE_MESSAGE(recipe.ok(), config::render(recipe.diagnostics, recipe.sources));
  const auto model = models::build(recipe.config.model);
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) {
    const std::string& name = parameter->name();
    // 11.5 billion: without embedding and head, which are the model's, and without the projection.
    if (name.starts_with("mtp.layers.0.") && name != "mtp.layers.0.eh_proj.weight")
      count += parameter->spec().shape.elements();
  }
  CHECK(count > 11'450'000'000);
  CHECK(count < 11'550'000'000);
}

// The base models; 1.5B and those of 7B and more have 32768 as chat models
// (importers::positions_of_chat_model).
TEST_CASE("the presets of Qwen 2.5 have the published positions") {
  const std::pair<const char*, int64_t> published[] = {{"qwen2.5-0.5b", 32768}, {"qwen2.5-1.5b", 131072},
                                                       {"qwen2.5-3b", 32768},   {"qwen2.5-7b", 131072},
                                                       {"qwen2.5-14b", 131072}, {"qwen2.5-32b", 131072}};
  for (const auto& [name, positions] : published) {
    CAPTURE(name);
    config::Request request;
    request.recipe = name;
    const config::Resolution recipe = config::resolve(request);
    REQUIRE_MESSAGE(recipe.ok(), config::render(recipe.diagnostics, recipe.sources));
    CHECK(recipe.config.model.max_position_embeddings == positions);
    CHECK_FALSE(recipe.config.model.window_size);  // `use_sliding_window` is false in all of them
  }
}

TEST_CASE("model presets have the published number of parameters") {
  std::set<std::string> seen;
  for (const auto& [name, published] : kPublished) {
    CAPTURE(name);
    config::Request request;
    request.recipe = "quickstart";
    request.unset = {"model"};
    request.overrides.push_back(config::Override::token(std::string("model=") + name));
    const config::Resolution recipe = config::resolve(request);
    REQUIRE_MESSAGE(recipe.ok(), config::render(recipe.diagnostics, recipe.sources));
    const config::ModelConfig& m = recipe.config.model;
    int64_t count = 0;
    const auto model = models::build(m);
    for (const auto& parameter : model->parameters()) count += parameter->spec().shape.elements();
    const int64_t padding = *m.padded_vocab_size - m.vocab_size;
    count -= padding * m.hidden_size * (m.share_embeddings_and_output_weights ? 1 : 2);
    CHECK(count == published);
    seen.insert(name);
  }
  // They are not published.
  const std::set<std::string> others = {"gpt3-175b", "latent-155m"};
  for (const auto& preset : config::Library::standard().presets("model"))
    CHECK_MESSAGE(seen.count(preset.name) + others.count(preset.name) == 1, preset.name);
}
