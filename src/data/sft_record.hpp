// One line of a fine-tuning file: what it says, whichever of the usual forms it has.
//
//   messages            {"messages": [{"role", "content", …}, …], "tools": […]}
//   sharegpt            {"conversations": [{"from", "value"}, …], "system", "tools"}
//   alpaca              {"instruction", "input", "output", "system", "history": [[question, answer], …]}
//   prompt_completion   {"prompt", "completion"}: two texts, or two lists of messages
//   text                {"text"} or {"content"}
//
// An assistant's message with "weight": 0 or "train": false is not learned. A content that is a list of text
// parts is their text joined. Tools may be a JSON text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/chat/chat_template.hpp"

namespace capstan::data {

enum class SftFormat : uint8_t { automatic, messages, sharegpt, alpaca, prompt_completion, text };
std::string_view name_of(SftFormat format);

struct SftDialogue {
  text::chat::Conversation conversation;
  std::vector<bool> learned;  // of each message: false where the record takes it out
};
struct SftText {
  std::string prompt, completion;  // text: no prompt
};
struct SftRecord {
  SftFormat format = SftFormat::automatic;
  std::variant<SftDialogue, SftText> what;
};

// Reads records; one for each thread.
class SftRecordParser {
 public:
  SftRecordParser();
  ~SftRecordParser();

  // `json` has 64 readable bytes behind it. automatic: by its keys. Errors are ErrorCode::format without a
  // file: what is wrong and what would be right; `byte`, where given, is set to the place of an error in
  // `json`.
  SftRecord parse(std::string_view json, SftFormat format, size_t* byte = nullptr);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
