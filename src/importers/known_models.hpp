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

// Returns max_position_embeddings of a chat model, by either kind of name, if it is smaller than that of its
// base model, which the preset describes; else nullopt.
std::optional<int64_t> positions_of_chat_model(std::string_view name);

// The vocabulary size of a preset of configs/model; 0 if there is no such preset.
int64_t vocabulary_of_preset(const std::string& preset);

}  // namespace capstan::importers
