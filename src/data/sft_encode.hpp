// A fine-tuning sample as tokens, each with its loss mask.
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

// The part of a conversation that counts in the loss. For a prompt and completion this is the completion,
// unless `all` is selected; for a text it is the full text.
enum class SftLoss : uint8_t { assistant, last_turn, all };

struct EncodedSample {
  std::vector<int32_t> ids;
  // Whether each id counts in the loss.
  std::vector<bool> loss_mask;
};

// Immutable; any number of threads may encode.
class SftEncoder {
 public:
  // chat_template: renders conversations; if null, encode() throws for them. eod: the token that ends texts
  // and completions; if nullopt, encode() throws for them. The tokenizer must outlive the encoder.
  SftEncoder(const text::Tokenizer& tokenizer, std::shared_ptr<const text::chat::ChatTemplate> chat_template,
             SftLoss loss, std::optional<int32_t> eod);

  // Renders a conversation with the template and tokenizes the text: special tokens in the text are
  // recognized, and none is added. A token counts in the loss if any of its text does. Throws
  // ErrorCode::format if the template rejects the conversation.
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

// The template that comes with a tokenizer, from chat_template.jinja or tokenizer_config.json; null if there
// is none.
std::shared_ptr<const text::chat::ChatTemplate> own_chat_template(const text::Tokenizer& tokenizer);

}  // namespace capstan::data
