// A question to a model that was taught on conversations, and where its answer ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "text/chat/chat_template.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

// The variables of the tokenizer (bos_token, eos_token; `eod` stands in for the latter) and a clock that
// stands still: the same text on every day.
text::chat::RenderOptions chat_rendering(const text::Tokenizer& tokenizer, std::optional<int32_t> eod);

struct ChatPrompt {
  // What the template puts before an answer, with a generation prompt.
  std::vector<int32_t> ids;
  // What the template puts behind one: a special token, or a text where it has none. Both may be missing.
  std::optional<int32_t> end_token;
  std::string end_text;
  // Whether `end_token` is in what the tokenizer makes of a conversation, so that a model learns it.
  bool learns_end = false;
};

// system: empty for none. ErrorCode::format where the template refuses such a conversation.
ChatPrompt chat_prompt(const text::Tokenizer& tokenizer, const text::chat::ChatTemplate& chat_template,
                       std::optional<int32_t> eod, const std::string& system, const std::string& user);

}  // namespace capstan::data
