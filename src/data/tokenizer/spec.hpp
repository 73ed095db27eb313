// What the files of a tokenizer say, before it is built: load.cpp reads it, build.cpp checks it and makes the
// stages. Texts are views into the documents that the loader holds until the tokenizer is built.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer/added_tokens.hpp"
#include "data/tokenizer/normalizer.hpp"
#include "data/tokenizer/pre_tokenizer.hpp"

namespace capstan::data {

struct TokenizerSpec {
  // "file: model.vocab" and the like, for messages.
  std::string vocab_place, merges_place, added_place;
  bool merges_are_lines = false;  // of merges.txt: messages count from 1

  std::vector<std::pair<std::string_view, int32_t>> vocab;  // ids >= 0
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  std::vector<AddedToken> added;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  bool ignore_merges = false, fuse_unknown = false, byte_fallback = false;
  std::optional<std::string> unknown;
  std::optional<std::string> bos, eos;  // by the files' own word (a template, tokenizer_config.json)
};

}  // namespace capstan::data
