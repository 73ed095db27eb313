// Parses one line of a fine-tuning file in any of the usual formats:
//
//   messages            {"messages": [{"role", "content", …}, …], "tools": […], "chat_template_kwargs": {…}}
//   sharegpt            {"conversations": [{"from", "value"}, …], "system", "tools"}
//   alpaca              {"instruction", "input", "output", "system", "history": [[question, answer], …]}
//   prompt_completion   {"prompt", "completion"}: two texts, or two lists of messages
//   text                {"text"} or {"content"}
//
// An assistant's message with "weight": 0 or "train": false does not count in the loss. A content that is a
// list of text parts is their text joined. Tools may be a JSON text. chat_template_kwargs, TRL's name, has
// variables of the chat template; sharegpt and lists of messages may have it too.
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
  // Whether each message counts in the loss; false where the record excludes it.
  std::vector<bool> in_loss;
};
struct SftText {
  // Plain text is a completion without a prompt.
  std::string prompt, completion;
};
struct SftRecord {
  SftFormat format = SftFormat::automatic;
  std::variant<SftDialogue, SftText> what;
};

// A parser of records. Each thread needs its own.
class SftRecordParser {
 public:
  SftRecordParser();
  ~SftRecordParser();

  // Parses a record. 64 bytes after `json` must be readable. SftFormat::automatic chooses the format by the
  // keys. Throws ErrorCode::format with a message that names no file; `byte`, unless null, is set to the
  // offset of the error in `json`.
  SftRecord parse(std::string_view json, SftFormat format, size_t* byte = nullptr);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
