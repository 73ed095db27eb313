// What SentencePiece's own library does with a .model: its normalizer, and its BPE, which merges by scores.
// (Its Unigram is unigram.hpp's in single precision.)
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text/tokenizer/byte_trie.hpp"
#include "text/tokenizer/charsmap.hpp"
#include "text/tokenizer/decoder.hpp"
#include "text/tokenizer/model.hpp"
#include "text/tokenizer/text_pieces.hpp"
#include "text/tokenizer/vocabulary.hpp"

namespace capstan::text {

struct SentencePieceNormalizer {
  std::shared_ptr<const Charsmap> charsmap;
  std::shared_ptr<const ByteTrie> user_defined;  // these pass as they are
  bool add_dummy_prefix = true;
  bool remove_extra_spaces = true;
  bool escape_spaces = true;     // as ▁
  bool space_as_suffix = false;  // the dummy goes to the end
};
TextStepPtr sentencepiece_step(const SentencePieceNormalizer& normalizer);

class SentencePieceBpe final : public Model {
 public:
  // Scores and kinds by id.
  SentencePieceBpe(const Vocabulary& vocabulary, std::vector<double> scores, std::vector<PieceKind> kinds,
                   int32_t unknown, const std::vector<int32_t>& byte_ids);

  std::unique_ptr<Model::Scratch> make_scratch() const override;
  void encode_piece(std::string_view piece, Model::Scratch& scratch,
                    std::vector<ModelToken>& out) const override;

 private:
  struct Scratch;
  int32_t piece_id(std::string_view piece) const;  // -1: none

  const Vocabulary& vocabulary_;
  std::vector<double> scores_;
  std::vector<PieceKind> kinds_;
  int32_t unknown_;
  std::vector<int32_t> byte_ids_;  // empty without byte_fallback
  ByteTrie user_defined_;
};

}  // namespace capstan::text
