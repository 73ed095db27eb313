// WordPiece: from the left the longest token each time; a word that has no such way is one unknown token.
#pragma once

#include <string>

#include "text/tokenizer/byte_trie.hpp"
#include "text/tokenizer/model.hpp"
#include "text/tokenizer/vocabulary.hpp"

namespace capstan::text {

struct WordPieceOptions {
  int32_t unknown = -1;
  std::string prefix = "##";     // of tokens inside a word
  size_t most_characters = 100;  // a longer word is unknown
};

class WordPieceModel final : public Model {
 public:
  WordPieceModel(const Vocabulary& vocabulary, const WordPieceOptions& options);
  void encode_piece(std::string_view piece, Scratch& scratch, std::vector<ModelToken>& out) const override;

 private:
  ByteTrie starts_, insides_;  // insides without the prefix
  WordPieceOptions options_;
};

}  // namespace capstan::text
