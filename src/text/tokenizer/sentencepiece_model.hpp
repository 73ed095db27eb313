// The content of a SentencePiece .model, before it is a tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/decoder.hpp"
#include "text/tokenizer/sentencepiece.hpp"

namespace capstan::text {

struct SentencePieceModel {
  enum class Algorithm : uint8_t { unigram, bpe };
  struct Piece {
    // Valid UTF-8, not empty.
    std::string_view text;
    // Always finite.
    double score = 0;
    PieceKind kind = PieceKind::ordinary;
  };

  Algorithm algorithm = Algorithm::unigram;
  // Pieces by id; exactly one is of the kind `unknown`.
  std::vector<Piece> pieces;
  bool byte_fallback = false;
  // Ids as the file gives them, without a check of the piece's kind; -1: none.
  int64_t bos = 1, eos = 2, pad = -1;
  std::string unknown_surface = " \xE2\x81\x87 ";
  SentencePieceNormalizer normalizer;

  // The text of a control piece; empty for any other id.
  std::string_view control(int64_t id) const;
};

// Parses a model. Messages refer to the file as `name`. The pieces' texts point into `bytes`. Throws
// ErrorCode::format for malformed bytes, and ::unsupported for other algorithms and for a denormalization
// table.
SentencePieceModel read_sentencepiece_model(std::string_view bytes, const std::string& name);

}  // namespace capstan::text
