#include "text/tokenizer/bpe_json.hpp"

#include <utility>

namespace capstan::text {

void BpeJson::add_token(int64_t id, std::string_view content, bool special) {
  added_tokens.push_back({{"id", id},
                          {"content", content},
                          {"single_word", false},
                          {"lstrip", false},
                          {"rstrip", false},
                          {"normalized", false},
                          {"special", special}});
}

OrderedJson document(BpeJson bpe) {
  OrderedJson model = {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", std::move(bpe.unk_token)},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", bpe.fuse_unk},
                       {"byte_fallback", bpe.byte_fallback},
                       {"ignore_merges", bpe.ignore_merges}};
  model["vocab"] = std::move(bpe.vocab);
  model["merges"] = std::move(bpe.merges);
  OrderedJson result = {{"version", "1.0"},
                        {"truncation", nullptr},
                        {"padding", nullptr},
                        {"added_tokens", std::move(bpe.added_tokens)},
                        {"normalizer", std::move(bpe.normalizer)},
                        {"pre_tokenizer", std::move(bpe.pre_tokenizer)},
                        {"post_processor", std::move(bpe.post_processor)},
                        {"decoder", std::move(bpe.decoder)}};
  result["model"] = std::move(model);
  return result;
}

OrderedJson byte_level_json(bool add_prefix_space, bool trim_offsets, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", trim_offsets},
          {"use_regex", use_regex}};
}

OrderedJson split_json(std::string_view regex) {
  return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
}

}  // namespace capstan::text
