// Byte-pair merging of one piece, with a cache of pieces.
//
// The result equals that of Hugging Face's BPE: the adjacent pair of the lowest rank is merged repeatedly,
// the leftmost first. Short pieces search an array, long ones use a heap, so that no text takes quadratic
// time. The units are bytes (byte-level tokenizers) or characters (Llama 2, Gemma).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/model.hpp"
#include "text/tokenizer/vocabulary.hpp"

namespace capstan::text {

class BpeModel final : public Model {
 public:
  // Cached results for the pieces that one thread has seen.
  class Memory;
  struct Scratch final : Model::Scratch {
    Scratch();
    ~Scratch() override;
    size_t bytes() const override { return heap.capacity() * 8; }
    std::unique_ptr<Memory> memory;
    // Ids of the current piece.
    std::vector<int32_t> ids;
    // Bytes of each id; empty unless they are requested.
    std::vector<uint32_t> lengths;
    std::vector<uint64_t> heap;
    std::vector<int32_t> next, previous;
    std::vector<std::string_view> words;
    std::string text;
  };

  BpeModel(const Vocabulary& vocabulary, int64_t merges) : vocabulary_(vocabulary) { reserve(merges); }

  // Byte b is token id, or -1 when the vocabulary lacks it. With `characters` these are the tokens <0x00> …
  // <0xFF> of characters that are no token, if byte_fallback is set.
  std::array<int32_t, 256> byte_ids;
  // A piece that is a token is that token, whatever the merges say.
  bool ignore_merges = false;
  // Id of characters without a token; -1: they are dropped.
  int32_t unknown = -1;
  bool fuse_unknown = false;

  // Merge characters instead of bytes.
  bool characters = false;
  bool byte_fallback = false;
  // The prefix of every character but a piece's first, and the suffix of its last.
  std::string prefix, suffix;

  // Merging (left, right) gives `id`; lower ranks are merged first. A later merge of the same pair replaces
  // an earlier one.
  void add_merge(int32_t left, int32_t right, uint32_t rank, int32_t id);

  // After the last merge, with `characters`: finds out whether text may be split into words before merging.
  void finish_characters();

  std::unique_ptr<Model::Scratch> make_scratch() const override { return std::make_unique<Scratch>(); }
  void encode(const PieceBatch& batch, Model::Scratch& scratch, std::vector<int32_t>& out) const override;
  void encode_piece(std::string_view piece, Model::Scratch& scratch,
                    std::vector<ModelToken>& out) const override;

 private:
  struct Merge {
    // left << 32 | right; kFree in a free slot.
    uint64_t pair;
    uint32_t rank;
    int32_t id;
  };
  static constexpr uint64_t kFree = ~uint64_t{0};

  void reserve(int64_t merges);
  const Merge* find(int32_t left, int32_t right) const {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    for (uint64_t i = slot(pair);; i = (i + 1) & mask_) {
      if (merges_[i].pair == pair) return &merges_[i];
      if (merges_[i].pair == kFree) return nullptr;
    }
  }
  uint64_t slot(uint64_t pair) const { return (pair * 0x9E3779B97F4A7C15u) >> shift_; }
  void encode_words(const PieceBatch& batch, Scratch& scratch, std::vector<int32_t>& out) const;
  // Writes the ids of the single bytes, or characters, to scratch.ids, without merging them.
  void look_up(std::string_view piece, Scratch& scratch) const;
  void look_up_characters(std::string_view piece, Scratch& scratch) const;
  // With ignore_merges, writes the id of a piece that is itself a token to scratch.ids and returns true.
  bool find_token(std::string_view piece, Scratch& scratch) const;
  // Writes the merged ids of the piece to scratch.ids.
  void encode_ids(std::string_view piece, Scratch& scratch) const;
  int32_t character_id(std::string_view character, char32_t value) const;
  void merge_short(std::vector<int32_t>& ids) const;
  void merge_long(Scratch& scratch) const;

  const Vocabulary& vocabulary_;
  // Ids of the characters below U+10000, or -1.
  std::vector<int32_t> character_ids_;
  // No merge joins a character to a ▁ after it.
  bool split_words_ = false;
  std::vector<Merge> merges_;
  uint64_t mask_ = 0;
  int shift_ = 64;
};

}  // namespace capstan::text
