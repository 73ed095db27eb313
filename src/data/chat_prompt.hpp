// The prompt for a model that was trained on conversations, and the end of its answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "text/chat/chat_template.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

// Rendering options with the tokenizer's variables (bos_token, and eos_token or else `eod`) and a fixed date,
// so that the text is the same on every day.
text::chat::RenderOptions chat_rendering(const text::Tokenizer& tokenizer, std::optional<int32_t> eod);

struct ChatPrompt {
  // The text of the template before an answer, with a generation prompt.
  std::vector<int32_t> ids;
  // The text of the template after an answer: a special token, or a text where it has none. Both may be
  // missing.
  std::optional<int32_t> end_token;
  std::string end_text;
  // Whether tokenized conversations contain `end_token`, so that a model learns it.
  bool learns_end = false;
};

// system: the system message; empty: none. Throws ErrorCode::format if the template rejects such a
// conversation.
ChatPrompt chat_prompt(const text::Tokenizer& tokenizer, const text::chat::ChatTemplate& chat_template,
                       std::optional<int32_t> eod, const std::string& system, const std::string& user);

// Returns why a model that learns conversations of this template, or a program that reads its export, cannot
// recognize where an answer ends; empty if both can.
std::string turn_end_problem(const text::Tokenizer& tokenizer, const text::chat::ChatTemplate& chat_template,
                             std::optional<int32_t> eod);

}  // namespace capstan::data
