// What the files of a tokenizer say, before it is built: the loaders read it, tokenizer.cpp checks it and
// makes the stages. Texts are views into the documents that the loader holds until the tokenizer is built.
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
  std::string vocab_place, merges_place, added_place;
  bool merges_are_lines = false;  // of merges.txt: messages count from 1

  ModelKind model = ModelKind::bpe;
  std::vector<std::pair<std::string_view, int32_t>> vocab;  // ids >= 0
  std::optional<std::string> unknown;
  bool byte_fallback = false;
  // BPE.
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  bool ignore_merges = false, fuse_unknown = false;
  std::string prefix, suffix;  // prefix: WordPiece, too
  // Unigram and SentencePiece: by id.
  std::vector<double> scores;
  std::vector<PieceKind> kinds;   // SentencePiece only
  int64_t most_characters = 100;  // WordPiece

  std::vector<AddedToken> added;
  // All before the model is a Normalizer and a PreTokenizer: the fast way, if the model merges bytes.
  bool byte_level = false;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  // Any other way, and that for offsets: the same steps, and those with the byte alphabet where ByteLevel
  // puts it.
  TextSteps normalizers, splits, alphabet_splits;
  bool needs_origin = false;  // a step asks whether a piece begins the text
  std::optional<Decoder> decoder;
  std::vector<PostStep> post;

  // By the files' own word (a template, tokenizer_config.json, special_tokens_map.json).
  std::optional<std::string> bos, eos, unk, pad;
  std::optional<bool> add_bos, add_eos;  // instead of the template
};

}  // namespace capstan::text
