#include "importers/known_models.hpp"

#include "base/text.hpp"
#include "config/core/library.hpp"
#include "importers/draft.hpp"

namespace capstan::importers {

namespace {

struct Model {
  // Last component of a hub name in lower case, without a suffix `-chat`, `-instruct` or `-hf`.
  std::string_view name;
  std::string_view preset;
};
constexpr Model kModels[] = {
    {"deepseek-v2", "deepseek-v2"},
    {"deepseek-v2-lite", "deepseek-v2-lite"},
    {"deepseek-v3", "deepseek-v3"},
    {"deepseek-v3-base", "deepseek-v3"},
    {"gpt2", "gpt2-124m"},
    {"gpt2-medium", "gpt2-355m"},
    {"gpt2-large", "gpt2-774m"},
    {"gpt2-xl", "gpt2-1.5b"},
    {"llama-2-7b", "llama2-7b"},
    {"llama-2-13b", "llama2-13b"},
    {"llama-2-70b", "llama2-70b"},
    {"llama-3-8b", "llama3-8b"},
    {"llama-3-70b", "llama3-70b"},
    {"llama-3.1-8b", "llama3.1-8b"},
    {"llama-3.1-70b", "llama3.1-70b"},
    {"llama-3.3-70b", "llama3.1-70b"},
    {"llama-3.1-405b", "llama3.1-405b"},
    {"llama-3.2-1b", "llama3.2-1b"},
    {"llama-3.2-3b", "llama3.2-3b"},
    {"gemma-2-2b", "gemma2-2b"},
    {"gemma-2-9b", "gemma2-9b"},
    {"gemma-2-27b", "gemma2-27b"},
    {"gpt-oss-20b", "gpt-oss-20b"},
    {"gpt-oss-120b", "gpt-oss-120b"},
    {"mistral-7b-v0.1", "mistral-7b-v0.1"},
    {"mistral-7b-v0.3", "mistral-7b"},
    {"mistral-7b-instruct-v0.1", "mistral-7b-v0.1"},
    {"mistral-7b-instruct-v0.3", "mistral-7b"},
    {"mixtral-8x7b-v0.1", "mixtral-8x7b"},
    {"mixtral-8x7b-instruct-v0.1", "mixtral-8x7b"},
    {"mixtral-8x22b-v0.1", "mixtral-8x22b"},
    {"olmo-2-0425-1b", "olmo2-1b"},
    {"olmo-2-1124-7b", "olmo2-7b"},
    {"olmo-2-1124-13b", "olmo2-13b"},
    {"olmoe-1b-7b-0125", "olmoe-1b-7b"},
    {"phi-3-mini-4k", "phi3-mini"},
    {"phi-3.5-mini", "phi3.5-mini"},
    {"pythia-160m", "pythia-160m"},
    {"pythia-160m-deduped", "pythia-160m"},
    {"pythia-1.4b", "pythia-1.4b"},
    {"pythia-1.4b-deduped", "pythia-1.4b"},
    {"qwen2.5-0.5b", "qwen2.5-0.5b"},
    {"qwen2.5-1.5b", "qwen2.5-1.5b"},
    {"qwen2.5-3b", "qwen2.5-3b"},
    {"qwen2.5-7b", "qwen2.5-7b"},
    {"qwen2.5-14b", "qwen2.5-14b"},
    {"qwen2.5-32b", "qwen2.5-32b"},
    {"qwen3-0.6b", "qwen3-0.6b"},
    {"qwen3-1.7b", "qwen3-1.7b"},
    {"qwen3-4b", "qwen3-4b"},
    {"qwen3-8b", "qwen3-8b"},
    {"qwen3-14b", "qwen3-14b"},
    {"qwen3-32b", "qwen3-32b"},
    {"qwen3-30b-a3b", "qwen3-30b-a3b"},
    {"qwen3-235b-a22b", "qwen3-235b-a22b"},
    {"moonlight-16b-a3b", "moonlight-16b-a3b"},
    {"kimi-k2", "kimi-k2"},
    {"smollm2-135m", "smollm2-135m"},
    {"smollm2-360m", "smollm2-360m"},
    {"smollm2-1.7b", "smollm2-1.7b"},
};

// Builders of torchtune, without the prefixes `lora_`, `qlora_` and `dora_` and the suffixes `_base` and
// `_instruct`.
constexpr Model kBuilders[] = {
    {"llama2_7b", "llama2-7b"},       {"llama2_13b", "llama2-13b"},     {"llama2_70b", "llama2-70b"},
    {"llama3_8b", "llama3-8b"},       {"llama3_70b", "llama3-70b"},     {"llama3_1_8b", "llama3.1-8b"},
    {"llama3_1_70b", "llama3.1-70b"}, {"llama3_3_70b", "llama3.1-70b"}, {"llama3_1_405b", "llama3.1-405b"},
    {"llama3_2_1b", "llama3.2-1b"},   {"llama3_2_3b", "llama3.2-3b"},   {"gemma2_2b", "gemma2-2b"},
    {"gemma2_9b", "gemma2-9b"},       {"gemma2_27b", "gemma2-27b"},     {"mistral_7b", "mistral-7b-v0.1"},
    {"phi3_mini", "phi3-mini"},       {"qwen2_5_0_5b", "qwen2.5-0.5b"}, {"qwen2_5_1_5b", "qwen2.5-1.5b"},
    {"qwen2_5_3b", "qwen2.5-3b"},     {"qwen2_5_7b", "qwen2.5-7b"},     {"qwen2_5_14b", "qwen2.5-14b"},
    {"qwen2_5_32b", "qwen2.5-32b"},   {"qwen3_0_6b", "qwen3-0.6b"},     {"qwen3_1_7b", "qwen3-1.7b"},
    {"qwen3_4b", "qwen3-4b"},         {"qwen3_8b", "qwen3-8b"},         {"qwen3_14b", "qwen3-14b"},
    {"qwen3_32b", "qwen3-32b"},
};

template <size_t N>
std::optional<std::string> look_up(const Model (&models)[N], std::string_view name) {
  for (const Model& model : models)
    if (model.name == name) return std::string(model.preset);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> preset_of_model(std::string_view hub_name) {
  std::string name = lower_case(hub_name);
  while (name.ends_with('/')) name.pop_back();
  if (const auto slash = name.rfind('/'); slash != std::string::npos) name.erase(0, slash + 1);
  if (name.starts_with("meta-llama-3")) name.erase(0, std::string_view("meta-").size());
  // A finetuned model has the shape of its base.
  while (true) {
    if (auto found = look_up(kModels, name)) return found;
    const auto dash = name.rfind('-');
    const std::string_view end =
        dash == std::string::npos ? std::string_view() : std::string_view(name).substr(dash);
    if (end != "-hf" && end != "-chat" && end != "-instruct" && end != "-base" && end != "-it")
      return std::nullopt;
    name.erase(dash);
  }
}

std::optional<std::string> preset_of_builder(std::string_view component) {
  std::string_view name = component;
  if (!name.starts_with("torchtune.models.")) return std::nullopt;
  name.remove_prefix(name.rfind('.') + 1);
  for (const std::string_view prefix : {"qlora_", "lora_", "dora_", "qdora_"})
    if (name.starts_with(prefix)) {
      name.remove_prefix(prefix.size());
      break;
    }
  for (const std::string_view suffix : {"_base", "_instruct"})
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  return look_up(kBuilders, name);
}

std::optional<int64_t> positions_of_chat_model(std::string_view name) {
  const std::string text = lower_case(name);
  const bool chat = text.find("instruct") != std::string::npos;
  for (const std::string_view model : {"qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b",
                                       "qwen2_5_1_5b", "qwen2_5_7b", "qwen2_5_14b", "qwen2_5_32b"})
    if (chat && text.find(model) != std::string::npos) return 32768;
  return std::nullopt;
}

int64_t vocabulary_of_preset(const std::string& preset) {
  for (const config::LibraryFile& file : config::library_files()) {
    if (file.path != "configs/model/" + preset + ".yaml") continue;
    for (const auto line : split(file.text, '\n'))
      if (line.starts_with("vocab_size:")) return parse_int(trim(line.substr(11))).value_or(0);
    for (const auto line : split(file.text, '\n'))
      if (line.starts_with("extends:")) return vocabulary_of_preset(std::string(trim(line.substr(8))));
  }
  return 0;
}

}  // namespace capstan::importers
