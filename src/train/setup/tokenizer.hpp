// The tokenizer and the chat template of a recipe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "config/sections/config.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::text::chat {
// text/chat/chat_template.hpp.
class ChatTemplate;
}  // namespace capstan::text::chat

namespace capstan::checkpoint {
// checkpoint/reader.hpp.
class Reader;
}  // namespace capstan::checkpoint

namespace capstan::train {

// A tokenizer by the name that a recipe or a command line gives it: a file, a directory, hf:DIR, gguf:FILE, a
// run or `bytes`.
std::shared_ptr<const text::Tokenizer> load_tokenizer_files(const std::string& name);

// The tokenizer's name in the recipe, for messages.
std::string tokenizer_name(const config::TokenizerConfig& tokenizer);

// Null when the recipe has none. Checks that the vocabulary fits the model.
std::shared_ptr<const text::Tokenizer> load_tokenizer(const config::Config& config);

// ErrorCode::failed if the checkpoint records that its run was trained with another tokenizer.
void require_own_tokenizer(const config::Config& config, const text::Tokenizer& tokenizer,
                           const checkpoint::Reader& reader);

// Throws ErrorCode::failed if the adapters of `reader` were trained with another tokenizer than that of their
// base, `tokenizer`. name: name of the adapters in the message.
void require_adapter_tokenizer(const config::Config& config, const text::Tokenizer& tokenizer,
                               const checkpoint::Reader& reader, const std::string& name);

// Checks the tokenizer for training. ErrorCode::config if tokenizer.eod_token is not the default and the
// tokenizer lacks it.
void require_eod_token(const config::Config& config, const text::Tokenizer& tokenizer);

// tokenizer.eod_token if the tokenizer has it, else the tokenizer's own.
std::optional<int32_t> end_of_document(const config::Config& config, const text::Tokenizer& tokenizer);

// True where tokenizer.chat_template is the name of a known template and not a file.
bool names_known_template(const config::Path& chosen);

// tokenizer.chat_template, else the tokenizer's own; null where there is neither.
std::shared_ptr<const text::chat::ChatTemplate> chat_template_of(const config::Config& config,
                                                                 const text::Tokenizer& tokenizer);

}  // namespace capstan::train
