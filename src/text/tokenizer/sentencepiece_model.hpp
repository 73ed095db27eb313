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
    std::string_view text;  // UTF-8, not empty
    double score = 0;       // finite
    PieceKind kind = PieceKind::ordinary;
  };

  Algorithm algorithm = Algorithm::unigram;
  std::vector<Piece> pieces;  // by id; exactly one is of the kind `unknown`
  bool byte_fallback = false;
  int64_t bos = 1, eos = 2, pad = -1;  // ids as the file has them, whatever piece that is; -1: none
  std::string unknown_surface = " \xE2\x81\x87 ";
  SentencePieceNormalizer normalizer;

  // The piece's text where the id is that of a control piece; else empty.
  std::string_view control(int64_t id) const;
};

// `name` is what messages call the file. The pieces' texts point into `bytes`. ErrorCode::format for what is
// no such model; ::unsupported for other algorithms and for a table for decoding.
SentencePieceModel read_sentencepiece_model(std::string_view bytes, const std::string& name);

}  // namespace capstan::text
