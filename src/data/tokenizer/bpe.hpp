// Byte-pair merging of one piece, with a memory of pieces seen.
//
// The result is that of Hugging Face's BPE: again and again the adjacent pair of the lowest rank is merged,
// the leftmost first. Short pieces do so by looking through an array, long ones with a heap, so that no text
// takes quadratic time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/pre_tokenizer.hpp"
#include "data/tokenizer/vocabulary.hpp"

namespace capstan::data {

class BpeModel {
 public:
  // What is known of the pieces that one thread has seen; it only saves time.
  class Memory;
  struct Scratch {
    Scratch();
    ~Scratch();
    std::unique_ptr<Memory> memory;
    std::vector<int32_t> ids;  // of the piece at hand
    std::vector<uint64_t> heap;
    std::vector<int32_t> next, previous;
    std::string text;
  };

  BpeModel(int64_t merges) { reserve(merges); }

  // Byte b is token id, or -1 when the vocabulary lacks it.
  std::array<int32_t, 256> byte_ids;
  bool ignore_merges = false;  // a piece that is a token is that token, whatever the merges say
  int32_t unknown = -1;        // for bytes that have no token; -1: they are left out
  bool fuse_unknown = false;

  // Merging (left, right) gives `id`; a lower rank goes first. Of two merges of one pair the later one
  // counts.
  void add_merge(int32_t left, int32_t right, uint32_t rank, int32_t id);

  // Appends the ids of the pieces to out.
  void encode(const PieceBatch& batch, const Vocabulary& vocabulary, Scratch& scratch,
              std::vector<int32_t>& out) const;

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
  void encode_piece(std::string_view piece, const Vocabulary& vocabulary,
                    Scratch& scratch) const;  // → scratch.ids
  void merge_short(std::vector<int32_t>& ids) const;
  void merge_long(Scratch& scratch) const;

  std::vector<Merge> merges_;
  uint64_t mask_ = 0;
  int shift_ = 64;
};

}  // namespace capstan::data
