// A fine-tuning sample as tokens, each learned or not.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "data/sft_record.hpp"
#include "text/chat/chat_template.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

// What is learned of a conversation; of a prompt and completion: the completion, or all; of a text: all.
enum class SftLoss : uint8_t { assistant, last_turn, all };

struct EncodedSample {
  std::vector<int32_t> ids;
  std::vector<bool> learned;  // of each id: it is something to predict
};

// Immutable; any number of threads may encode.
class SftEncoder {
 public:
  // The template of conversations (null: they are an error that says so), and the token that ends texts and
  // completions (nullopt: likewise). The tokenizer outlives the encoder.
  SftEncoder(const text::Tokenizer& tokenizer, std::shared_ptr<const text::chat::ChatTemplate> chat_template,
             SftLoss loss, std::optional<int32_t> eod);

  // A conversation becomes its template's text, then tokens: those that the template names are
  // recognized, none is added. A token is learned where a learned text has a part in it. ErrorCode::format
  // where the template refuses the conversation.
  EncodedSample encode(const SftRecord& record) const;

 private:
  EncodedSample encode_dialogue(const SftDialogue& dialogue, SftFormat format) const;
  EncodedSample encode_text(const SftText& text) const;

  const text::Tokenizer& tokenizer_;
  std::shared_ptr<const text::chat::ChatTemplate> template_, alpaca_;
  text::chat::RenderOptions render_;
  SftLoss loss_;
  std::optional<int32_t> eod_;
};

// The template that comes with a tokenizer: chat_template.jinja, or what its tokenizer_config.json says.
// Null: none.
std::shared_ptr<const text::chat::ChatTemplate> own_chat_template(const text::Tokenizer& tokenizer);

}  // namespace capstan::data
