// SentencePiece's treatment of a .model: its normalizer, and its BPE, which merges by scores. (Its Unigram is
// unigram.hpp's in single precision.)
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
  // Texts that the normalizer keeps unchanged.
  std::shared_ptr<const ByteTrie> user_defined;
  bool add_dummy_prefix = true;
  bool remove_extra_spaces = true;
  // Replaces spaces by ▁.
  bool escape_spaces = true;
  // Adds the dummy space at the end of the text instead of the beginning.
  bool space_as_suffix = false;
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
  // Id of a piece, or -1.
  int32_t piece_id(std::string_view piece) const;

  const Vocabulary& vocabulary_;
  std::vector<double> scores_;
  std::vector<PieceKind> kinds_;
  int32_t unknown_;
  // Empty without byte_fallback.
  std::vector<int32_t> byte_ids_;
  ByteTrie user_defined_;
};

}  // namespace capstan::text
