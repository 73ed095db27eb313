// The content of a tokenizer's files, before it is built: the loaders read it, build.cpp checks it and makes
// the components. Texts are views into the documents that the loader holds until the tokenizer is built.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer/added_tokens.hpp"
#include "text/tokenizer/decoder.hpp"
#include "text/tokenizer/normalizer.hpp"
#include "text/tokenizer/post_processor.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"
#include "text/tokenizer/text_pieces.hpp"

namespace capstan::text {

struct TokenizerSpec {
  enum class ModelKind : uint8_t { bpe, unigram, word_piece, sentencepiece_bpe };

  // "file: model.vocab" and the like, for messages.
  std::string vocab_location, merges_location, added_location;
  // The merges are the lines of merges.txt; messages count them from 1.
  bool merges_are_lines = false;

  ModelKind model = ModelKind::bpe;
  // Tokens and their ids, which are not negative.
  std::vector<std::pair<std::string_view, int32_t>> vocab;
  std::optional<std::string> unknown;
  bool byte_fallback = false;
  // Fields of BPE.
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  bool ignore_merges = false, fuse_unknown = false;
  // Prefix of tokens that continue a word (BPE and WordPiece), and suffix of the token that ends a word
  // (BPE).
  std::string prefix, suffix;
  // Scores by id (Unigram and SentencePiece), and kinds by id (SentencePiece only).
  std::vector<double> scores;
  std::vector<PieceKind> kinds;
  // WordPiece: a word with more characters becomes the unknown token.
  int64_t max_characters_per_word = 100;

  std::vector<AddedToken> added;
  // The steps before the model are a Normalizer and a PreTokenizer, which is the fast path if the model
  // merges bytes.
  bool byte_level = false;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  // The general path, also used for offsets: the same steps, and the splits that write the byte alphabet
  // where ByteLevel does.
  TextSteps normalizers, splits, alphabet_splits;
  // Some step depends on whether a piece begins the text.
  bool needs_origin = false;
  std::optional<Decoder> decoder;
  std::vector<PostStep> post;

  // Special tokens that the files name: a post-processor template, tokenizer_config.json or
  // special_tokens_map.json.
  std::optional<std::string> bos, eos, unk, pad;
  // Whether encoding adds BOS and EOS. If set, they take precedence over the template.
  std::optional<bool> add_bos, add_eos;
};

}  // namespace capstan::text
