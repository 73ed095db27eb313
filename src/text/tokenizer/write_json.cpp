#include "text/tokenizer/write_json.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/tokenizer/bpe_json.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"

namespace capstan::text {

namespace {

OrderedJson pre_tokenizer(const TokenizerText& text) {
  if (text.pre_tokenizer == PreTokenizerChoice::gpt2)
    return byte_level_json(text.add_prefix_space, true, true);
  const auto pattern = text.pre_tokenizer == PreTokenizerChoice::llama3 ? kLlama3Pattern : kQwen2Pattern;
  return {{"type", "Sequence"},
          {"pretokenizers", {split_json(pattern), byte_level_json(text.add_prefix_space, true, false)}}};
}

BpeJson bpe_of(TokenizerText text) {
  BpeJson bpe;
  std::sort(text.special_ids.begin(), text.special_ids.end());
  for (const int32_t id : text.special_ids) {
    const auto token = std::find_if(text.vocab.begin(), text.vocab.end(),
                                    [&](const auto& entry) { return entry.second == id; });
    bpe.add_token(id, token->first, true);
  }
  for (const auto& [token, id] : text.vocab) bpe.vocab.emplace_back(token, id);
  for (const auto& [left, right] : text.merges) bpe.merges.push_back({left, right});
  if (text.pre_tokenizer == PreTokenizerChoice::qwen2) bpe.normalizer = {{"type", "NFC"}};
  bpe.pre_tokenizer = pre_tokenizer(text);
  bpe.post_processor = byte_level_json(true, false, true);
  bpe.decoder = byte_level_json(true, true, true);
  bpe.ignore_merges = text.ignore_merges;
  return bpe;
}

}  // namespace

PreTokenizerChoice pre_tokenizer_by_name(std::string_view name) {
  if (name == "gpt2") return PreTokenizerChoice::gpt2;
  if (name == "llama3") return PreTokenizerChoice::llama3;
  if (name == "qwen2") return PreTokenizerChoice::qwen2;
  fail(ErrorCode::usage, "there is no pre-tokenizer " + in_quotes(name), "one of gpt2, llama3, qwen2");
}

std::string tokenizer_json(TokenizerText text) {
  return dump_json(document(bpe_of(std::move(text))), 2);
}

std::string byte_tokenizer_json() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.push_back(byte_text(b));
  TokenizerText text;
  for (int b = 0; b < 256; ++b) text.vocab.emplace_back(tokens[static_cast<size_t>(b)], b);
  text.vocab.emplace_back("<|endoftext|>", 256);
  text.special_ids = {256};
  BpeJson bpe = bpe_of(std::move(text));
  bpe.pre_tokenizer = bpe.decoder = byte_level_json(false, true, false);
  bpe.post_processor = nullptr;
  return dump_json(document(std::move(bpe)));
}

}  // namespace capstan::text
