// The text of a tokenizer.json for a byte-level BPE tokenizer, laid out as Hugging Face saves it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer/pre_tokenizer_choice.hpp"

namespace capstan::text {

struct TokenizerText {
  PreTokenizerChoice pre_tokenizer = PreTokenizerChoice::gpt2;
  bool add_prefix_space = false;
  // A piece that is in the vocabulary is one token (Llama 3).
  bool ignore_merges = false;
  // Ids of the special tokens.
  std::vector<int32_t> special_ids;
  std::vector<std::pair<std::string_view, int32_t>> vocab;
  // The merges in the order of their rank.
  std::vector<std::pair<std::string_view, std::string_view>> merges;
};

std::string tokenizer_json(TokenizerText text);
// The tokenizer.json of byte_tokenizer(), in one line.
std::string byte_tokenizer_json();

}  // namespace capstan::text
