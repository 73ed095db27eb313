// The tokenizer.json of a BPE tokenizer, with its keys in the order in which Hugging Face writes them.
// Included only by .cpp files.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/json.hpp"

namespace capstan::text {

struct BpeJson {
  OrderedJson added_tokens = OrderedJson::array();
  OrderedJson normalizer, pre_tokenizer, post_processor, decoder;
  OrderedJson unk_token;
  bool fuse_unk = false, byte_fallback = false, ignore_merges = false;
  // Ids by token. Entries are added with emplace_back(), because operator[] searches all earlier tokens.
  OrderedJson::object_t vocab;
  // Pairs of tokens in the order of their rank.
  OrderedJson merges = OrderedJson::array();

  void add_token(int64_t id, std::string_view content, bool special);
};

OrderedJson document(BpeJson bpe);

// The JSON of the pre-tokenizer ByteLevel, and of a Split that keeps each match of `regex` and the text
// between matches.
OrderedJson byte_level_json(bool add_prefix_space, bool trim_offsets, bool use_regex);
OrderedJson split_json(std::string_view regex);

}  // namespace capstan::text
