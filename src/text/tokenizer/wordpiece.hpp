// WordPiece: takes the longest matching token from the left each time. A word that cannot be split this way
// becomes one unknown token.
#pragma once

#include <string>

#include "text/tokenizer/byte_trie.hpp"
#include "text/tokenizer/model.hpp"
#include "text/tokenizer/vocabulary.hpp"

namespace capstan::text {

struct WordPieceOptions {
  int32_t unknown = -1;
  // Prefix of the tokens that continue a word.
  std::string prefix = "##";
  // A word with more characters becomes the unknown token.
  size_t max_characters_per_word = 100;
};

class WordPieceModel final : public Model {
 public:
  WordPieceModel(const Vocabulary& vocabulary, const WordPieceOptions& options);
  void encode_piece(std::string_view piece, Scratch& scratch, std::vector<ModelToken>& out) const override;

 private:
  // The tokens that begin a word, and those that continue one (stored without the prefix).
  ByteTrie starts_, insides_;
  WordPieceOptions options_;
};

}  // namespace capstan::text
