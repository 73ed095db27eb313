// Byte-pair merging of one piece, with a memory of pieces seen.
//
// The result is that of Hugging Face's BPE: again and again the adjacent pair of the lowest rank is merged,
// the leftmost first. Short pieces do so by looking through an array, long ones with a heap, so that no text
// takes quadratic time. What is merged are bytes (of a byte-level tokenizer) or characters (Llama 2, Gemma).
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
  // What is known of the pieces that one thread has seen; it only saves time.
  class Memory;
  struct Scratch final : Model::Scratch {
    Scratch();
    ~Scratch() override;
    size_t bytes() const override { return heap.capacity() * 8; }
    std::unique_ptr<Memory> memory;
    std::vector<int32_t> ids;       // of the piece at hand
    std::vector<uint32_t> lengths;  // of the piece at hand, in bytes; empty where nobody asks
    std::vector<uint64_t> heap;
    std::vector<int32_t> next, previous;
    std::vector<std::string_view> words;
    std::string text;
  };

  BpeModel(const Vocabulary& vocabulary, int64_t merges) : vocabulary_(vocabulary) { reserve(merges); }

  // Byte b is token id, or -1 when the vocabulary lacks it. With `characters` these are the tokens <0x00> …
  // <0xFF> of characters that are no token, if byte_fallback is set.
  std::array<int32_t, 256> byte_ids;
  bool ignore_merges = false;  // a piece that is a token is that token, whatever the merges say
  int32_t unknown = -1;        // for what has no token; -1: it is left out
  bool fuse_unknown = false;

  bool characters = false;  // merge characters instead of bytes
  bool byte_fallback = false;
  std::string prefix, suffix;  // of every character but a piece's first; of its last

  // Merging (left, right) gives `id`; a lower rank goes first. Of two merges of one pair the later one
  // counts.
  void add_merge(int32_t left, int32_t right, uint32_t rank, int32_t id);

  // After the last merge, with `characters`: finds out whether text may be split into words before merging.
  void finish_characters();

  std::unique_ptr<Model::Scratch> make_scratch() const override { return std::make_unique<Scratch>(); }
  void encode(const PieceBatch& batch, Model::Scratch& scratch, std::vector<int32_t>& out) const override;
  void encode_piece(std::string_view piece, Model::Scratch& scratch,
                    std::vector<ModelToken>& out) const override;

 private:
  struct Merge {
    uint64_t pair;  // left << 32 | right; kFree in a free slot
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
  void look_up(std::string_view piece, Scratch& scratch) const;  // → scratch.ids, not merged
  void look_up_characters(std::string_view piece, Scratch& scratch) const;
  bool whole_piece(std::string_view piece, Scratch& scratch) const;
  void encode_ids(std::string_view piece, Scratch& scratch) const;  // → scratch.ids
  int32_t character_id(std::string_view character, char32_t value) const;
  void merge_short(std::vector<int32_t>& ids) const;
  void merge_long(Scratch& scratch) const;

  const Vocabulary& vocabulary_;
  std::vector<int32_t> character_ids_;  // below U+10000: id, -1
  bool split_words_ = false;            // no merge joins anything to a ▁ behind it
  std::vector<Merge> merges_;
  uint64_t mask_ = 0;
  int shift_ = 64;
};

}  // namespace capstan::text
