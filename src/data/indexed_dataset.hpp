// Reader of Megatron's indexed datasets: PREFIX.bin holds tokens back to back, PREFIX.idx says where each
// sequence and document begins.
//
//   .idx, little endian
//    0  "MMIDIDX\0\0"
//    9  u64 version = 1
//   17  u8  token type
//   18  u64 S = sequences
//   26  u64 D = documents + 1
//   34  i32 length[S], in tokens
//       i64 pointer[S], in bytes of .bin
//       i64 document[D], each its first sequence; starts with 0, the last is S
//       i8  mode[S], only in multimodal files; not used here
//
// Opening checks the sizes and, up to kFullCheckSequences, every length, pointer and document boundary
// (streamed: the pages of the index do not stay in memory). Beyond that each sequence is checked when it is
// read. All errors are ErrorCode::format and name the file and the byte offset. Reading is thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/file.hpp"
#include "base/function_ref.hpp"
#include "data/random_file.hpp"

namespace capstan::data {

enum class TokenType : uint8_t { u8 = 1, i8 = 2, i16 = 3, i32 = 4, i64 = 5, f64 = 6, f32 = 7, u16 = 8 };

// The name of a type, such as "u16".
std::string_view name_of(TokenType type);
int64_t bytes_of(TokenType type);
// u16 below 65500 (Megatron's threshold), else i32.
TokenType token_type_for_vocab(int64_t vocab_size);

inline constexpr int64_t kIndexHeaderBytes = 34;
inline constexpr char kIndexMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};

class IndexedDataset {
 public:
  static constexpr int64_t kFullCheckSequences = int64_t{1} << 26;

  // prefix: the path without .bin/.idx. vocab_size > 0: a token at or above it is an error when it is read.
  explicit IndexedDataset(std::string prefix, int64_t vocab_size = 0);

  const std::string& prefix() const { return prefix_; }
  TokenType type() const { return type_; }
  int64_t sequences() const { return sequences_; }
  int64_t documents() const { return documents_; }
  int64_t tokens() const { return tokens_; }
  int64_t bin_bytes() const { return bin_.size(); }
  bool multimodal() const { return multimodal_; }

  // Number of tokens of a sequence, >= 0.
  int32_t length(int64_t sequence) const;
  // Number of tokens before the sequence; first_token(sequences()) == tokens().
  int64_t first_token(int64_t sequence) const;
  // First sequence of a document; document_begin(documents()) == sequences().
  int64_t document_begin(int64_t document) const;

  // Prefetches the cache line of length(sequence), because a walk in shuffled order spends most of its time
  // waiting for these.
  void prefetch_length(int64_t sequence) const {
    __builtin_prefetch(index_.bytes().data() + lengths_at() + 4 * sequence);
  }

  // Tokens [offset, offset + out.size()) of a sequence.
  void read(int64_t sequence, int64_t offset, std::span<int32_t> out) const;

  // XXH3-128 of the .idx file, 32 hexadecimal digits. Reads the file again.
  std::string index_hash() const;

  // The largest id among `most` tokens of the .bin file at even distances, or among all tokens if there are
  // no more; -1 without tokens. Throws as read() does.
  int32_t largest_token(int64_t most) const;
  // Whether a token is among them.
  bool contains_token(int32_t id, int64_t most) const;

 private:
  // Calls `visit` with blocks at even distances, `most` tokens in total, until it returns false.
  void visit_blocks(int64_t most, FunctionRef<bool(std::span<const int32_t>)> visit) const;
  // Reads consecutive tokens of the .bin file.
  void read_tokens(int64_t first, std::span<int32_t> out) const;
  void check_header();
  void check_arrays(const RandomFile& index) const;
  [[noreturn]] void bad_index(int64_t offset, const std::string& what) const;
  int64_t lengths_at() const { return kIndexHeaderBytes; }
  int64_t pointers_at() const { return kIndexHeaderBytes + 4 * sequences_; }
  int64_t documents_at() const { return kIndexHeaderBytes + 12 * sequences_; }

  std::string prefix_, index_path_;
  int64_t vocab_size_;
  RandomFile bin_;
  MappedFile index_;
  TokenType type_ = TokenType::u16;
  int64_t item_bytes_ = 2;
  int64_t sequences_ = 0, documents_ = 0, tokens_ = 0;
  bool multimodal_ = false;
};

}  // namespace capstan::data
