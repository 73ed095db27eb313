// Models by the names that model hubs and other trainers give them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace capstan::importers {

// "meta-llama/Llama-3.1-8B-Instruct", "NousResearch/Meta-Llama-3-8B" → the preset of configs/model; nullopt:
// none.
std::optional<std::string> preset_of_model(std::string_view hub_name);
// "torchtune.models.llama3_1.lora_llama3_1_8b" → likewise.
std::optional<std::string> preset_of_builder(std::string_view component);

// max_position_embeddings of a chat model, by either kind of name, where its config.json has fewer than that
// of the base model, which the preset is; nullopt: those of the preset.
std::optional<int64_t> positions_of_chat_model(std::string_view name);

int64_t vocabulary_of_preset(const std::string& preset);  // 0: there is no such preset

}  // namespace capstan::importers
