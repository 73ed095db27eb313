// Turns a piece of text into tokens: one interface for byte-pair encoding (bpe.hpp), Unigram (unigram.hpp)
// and WordPiece (wordpiece.hpp). A model is immutable and shared by threads, each with its own Scratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "text/tokenizer/pre_tokenizer.hpp"

namespace capstan::text {

struct ModelToken {
  int32_t id;
  // Byte range of the token in the piece.
  size_t begin, end;
};

class Model {
 public:
  class Scratch {
   public:
    virtual ~Scratch() = default;
    // Bytes of memory that it retains after long texts.
    virtual size_t bytes() const { return 0; }
  };

  virtual ~Model() = default;
  virtual std::unique_ptr<Scratch> make_scratch() const { return std::make_unique<Scratch>(); }

  // Appends the tokens of one piece. Throws ErrorCode::unsupported for a piece beyond 2 GiB.
  virtual void encode_piece(std::string_view piece, Scratch& scratch, std::vector<ModelToken>& out) const = 0;
  // Appends the ids of pieces.
  virtual void encode(const PieceBatch& batch, Scratch& scratch, std::vector<int32_t>& out) const;
};

}  // namespace capstan::text
