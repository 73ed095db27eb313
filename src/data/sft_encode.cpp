#include "data/sft_encode.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "data/chat_prompt.hpp"
#include "text/chat/assistant_turns.hpp"

namespace capstan::data {

namespace {

// Bytes [first, second) of a text, in order.
using Spans = std::vector<std::pair<size_t, size_t>>;

text::Encoding tokenize(const text::Tokenizer& tokenizer, std::string_view text) {
  return tokenizer.encode_with_offsets(text, {.trim_offsets = false});
}

EncodedSample with_spans(text::Encoding tokens, const Spans& spans) {
  EncodedSample sample;
  for (const text::OffsetRange& range : tokens.offsets) {
    const auto span = std::upper_bound(spans.begin(), spans.end(), range.begin,
                                       [](size_t at, const auto& one) { return at < one.second; });
    sample.loss_mask.push_back(span != spans.end() && span->first < range.end);
  }
  sample.ids = std::move(tokens.ids);
  return sample;
}

}  // namespace

SftEncoder::SftEncoder(const text::Tokenizer& tokenizer,
                       std::shared_ptr<const text::chat::ChatTemplate> chat_template, SftLoss loss,
                       std::optional<int32_t> eod)
    : tokenizer_(tokenizer),
      template_(std::move(chat_template)),
      render_(chat_rendering(tokenizer, eod)),
      loss_(loss),
      eod_(eod) {
  if (!template_) alpaca_ = text::chat::ChatTemplate::load("alpaca");
}

EncodedSample SftEncoder::encode(const SftRecord& record) const {
  if (record.format == SftFormat::text && loss_ == SftLoss::last_turn)
    fail(ErrorCode::config, "samples of format text have no turns, and dataset.loss_mode is last_turn",
         "dataset.loss_mode=all");
  if (const auto* text = std::get_if<SftText>(&record.what)) return encode_text(*text);
  return encode_dialogue(std::get<SftDialogue>(record.what), record.format);
}

EncodedSample SftEncoder::encode_text(const SftText& text) const {
  if (!eod_)
    fail(ErrorCode::config,
         "texts and completions end with an end-of-document token, but the tokenizer has none",
         "name it with tokenizer.eod_token");
  const std::string all = text.prompt + text.completion;
  const Spans spans = {{loss_ == SftLoss::all ? 0 : text.prompt.size(), all.size()}};
  EncodedSample sample = with_spans(tokenize(tokenizer_, all), spans);
  sample.ids.push_back(*eod_);
  sample.loss_mask.push_back(true);
  return sample;
}

EncodedSample SftEncoder::encode_dialogue(const SftDialogue& dialogue, SftFormat format) const {
  const auto& chat_template = template_ ? template_ : alpaca_;
  if (!template_ && format != SftFormat::alpaca)
    fail(ErrorCode::config, "conversations need a chat template, and the tokenizer comes without one",
         "tokenizer.chat_template=chatml, another known template, or a .jinja file");
  const text::chat::Rendered rendered = chat_template->render(dialogue.conversation, render_);
  text::Encoding tokens = tokenize(tokenizer_, rendered.text);
  Spans spans;
  if (loss_ == SftLoss::all) {
    spans.emplace_back(0, rendered.text.size());
  } else {
    const auto boundary = [&](size_t offset) {
      const auto next =
          std::upper_bound(tokens.offsets.begin(), tokens.offsets.end(), offset,
                           [](size_t at, const text::OffsetRange& range) { return at < range.end; });
      return next == tokens.offsets.begin() ? 0 : (next - 1)->end;
    };
    for (const text::chat::AssistantTurn& turn : text::chat::assistant_turns(
             *chat_template, dialogue.conversation, render_, rendered, boundary, loss_ == SftLoss::last_turn))
      if (dialogue.in_loss[turn.message]) spans.emplace_back(turn.begin, turn.end);
  }
  return with_spans(std::move(tokens), spans);
}

std::shared_ptr<const text::chat::ChatTemplate> own_chat_template(const text::Tokenizer& tokenizer) {
  const auto file = [&](const char* name) -> const text::TokenizerFile* {
    for (const text::TokenizerFile& one : tokenizer.files())
      if (one.name == name) return &one;
    return nullptr;
  };
  const auto path_of = [](const text::TokenizerFile& of) {
    return of.path.empty() ? of.name : of.path.string();
  };
  const auto content = [](const text::TokenizerFile& of, uint64_t most) {
    return of.path.empty() ? of.text : read_file(of.path, most);
  };
  if (const auto* own = file("chat_template.jinja"))
    return text::chat::ChatTemplate::parse(path_of(*own), content(*own, text::chat::Source::kMaxBytes));
  const auto* config = file("tokenizer_config.json");
  if (!config) return nullptr;
  const std::string name = path_of(*config) + ": chat_template";
  const auto json = json_of(content(*config, uint64_t{64} << 20), IfNotJson::discard);
  if (!json.is_object() || !json.contains("chat_template")) return nullptr;
  const auto& value = json["chat_template"];
  if (value.is_string()) return text::chat::ChatTemplate::parse(name, value.get_ref<const std::string&>());
  // If there are several named templates, the one called `default` applies.
  if (value.is_array())
    for (const auto& one : value)
      if (one.is_object() && one.value("name", Json()) == "default" &&
          one.value("template", Json()).is_string())
        return text::chat::ChatTemplate::parse(name, one["template"].get_ref<const std::string&>());
  if (value.is_null()) return nullptr;
  fail(ErrorCode::format, name + " is neither a text nor a list with one named `default`",
       "tokenizer.chat_template names another one");
}

}  // namespace capstan::data
