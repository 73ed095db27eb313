// Unigram: of all ways to split a piece into tokens the one with the highest sum of scores.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "text/tokenizer/byte_trie.hpp"
#include "text/tokenizer/model.hpp"
#include "text/tokenizer/vocabulary.hpp"

namespace capstan::text {

struct UnigramOptions {
  int32_t unknown = -1;
  std::array<int32_t, 256> byte_ids{};  // of <0x00> … <0xFF>, for byte_fallback
  bool byte_fallback = false;
  // As SentencePiece itself adds: in single precision. Hugging Face adds in double precision, and equal sums
  // may be split otherwise.
  bool single_precision = false;
  double lowest = 0, highest = 0;  // of the scores of ordinary tokens
};

class UnigramModel final : public Model {
 public:
  enum class Kind : uint8_t { none, ordinary, user_defined };  // user-defined ones always win
  // By id, as many as the vocabulary's model has.
  UnigramModel(const Vocabulary& vocabulary, std::vector<double> scores, std::span<const Kind> kinds,
               const UnigramOptions& options);

  std::unique_ptr<Model::Scratch> make_scratch() const override;
  void encode_piece(std::string_view piece, Model::Scratch& scratch,
                    std::vector<ModelToken>& out) const override;

 private:
  struct Scratch;
  template <class Score>
  void search(std::string_view piece, Scratch& scratch) const;

  ByteTrie trie_;
  std::vector<double> scores_;
  std::vector<bool> user_defined_;
  UnigramOptions options_;
};

}  // namespace capstan::text
