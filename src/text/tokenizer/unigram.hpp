// Unigram: splits a piece into the tokens with the highest sum of scores.
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
  // Ids of <0x00> … <0xFF>, for byte_fallback.
  std::array<int32_t, 256> byte_ids{};
  bool byte_fallback = false;
  // Adds scores in single precision, as SentencePiece does. Hugging Face adds in double precision, which may
  // break ties between sums differently.
  bool single_precision = false;
  // Range of the scores of ordinary tokens.
  double lowest = 0, highest = 0;
};

class UnigramModel final : public Model {
 public:
  // User-defined tokens always win.
  enum class Kind : uint8_t { none, ordinary, user_defined };
  // `scores` and `kinds` have one entry for each id.
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
