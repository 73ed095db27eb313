#include "text/tokenizer/write_json.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"

namespace capstan::text {

namespace {

OrderedJson byte_level(bool add_prefix_space, bool trim_offsets, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", trim_offsets},
          {"use_regex", use_regex}};
}

OrderedJson pre_tokenizer(const TokenizerText& text) {
  if (text.pre_tokenizer == PreTokenizerChoice::gpt2) return byte_level(text.add_prefix_space, true, true);
  const auto pattern = text.pre_tokenizer == PreTokenizerChoice::llama3 ? kLlama3Pattern : kQwen2Pattern;
  const OrderedJson split = {
      {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level(text.add_prefix_space, true, false)}}};
}

OrderedJson document(TokenizerText text) {
  std::sort(text.special_ids.begin(), text.special_ids.end());
  OrderedJson added = OrderedJson::array(), merges = OrderedJson::array(), normalizer;
  for (const int32_t id : text.special_ids) {
    const auto token = std::find_if(text.vocab.begin(), text.vocab.end(),
                                    [&](const auto& entry) { return entry.second == id; });
    added.push_back({{"id", id},
                     {"content", token->first},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  OrderedJson::object_t vocab;  // not by operator[], which looks through all tokens before
  for (const auto& [token, id] : text.vocab) vocab.emplace_back(token, id);
  for (const auto& [left, right] : text.merges) merges.push_back({left, right});
  if (text.pre_tokenizer == PreTokenizerChoice::qwen2) normalizer = {{"type", "NFC"}};
  OrderedJson model = {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", text.ignore_merges}};
  model["vocab"] = std::move(vocab);
  model["merges"] = std::move(merges);
  OrderedJson result = {{"version", "1.0"},
                        {"truncation", nullptr},
                        {"padding", nullptr},
                        {"added_tokens", std::move(added)},
                        {"normalizer", std::move(normalizer)},
                        {"pre_tokenizer", pre_tokenizer(text)},
                        {"post_processor", byte_level(true, false, true)},
                        {"decoder", byte_level(true, true, true)}};
  result["model"] = std::move(model);
  return result;
}

}  // namespace

PreTokenizerChoice pre_tokenizer_by_name(std::string_view name) {
  if (name == "gpt2") return PreTokenizerChoice::gpt2;
  if (name == "llama3") return PreTokenizerChoice::llama3;
  if (name == "qwen2") return PreTokenizerChoice::qwen2;
  fail(ErrorCode::usage, "there is no pre-tokenizer " + capstan::quoted(name), "one of gpt2, llama3, qwen2");
}

std::string tokenizer_json(TokenizerText text) {
  return dump_json(document(std::move(text)), 2);
}

std::string byte_tokenizer_json() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.push_back(byte_text(b));
  TokenizerText text;
  for (int b = 0; b < 256; ++b) text.vocab.emplace_back(tokens[static_cast<size_t>(b)], b);
  text.vocab.emplace_back("<|endoftext|>", 256);
  text.special_ids = {256};
  OrderedJson json = document(std::move(text));
  json["pre_tokenizer"] = json["decoder"] = byte_level(false, true, false);
  json["post_processor"] = nullptr;
  return json.dump();
}

}  // namespace capstan::text
