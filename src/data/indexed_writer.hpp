// Writer of Megatron's indexed datasets (layout: indexed_dataset.hpp). Memory does not grow with the dataset:
// lengths and document boundaries are spooled beside the output until the counts of the header are known.
// Everything is written under temporary names; finish() syncs and renames, .idx last, so that a dataset
// appears completely or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/file.hpp"
#include "data/dataset_meta.hpp"
#include "data/indexed_dataset.hpp"

namespace capstan::data {

class IndexedWriter {
 public:
  IndexedWriter(std::string prefix, TokenType type);
  // Removes the temporary files unless finish() was called.
  ~IndexedWriter();
  IndexedWriter(const IndexedWriter&) = delete;
  IndexedWriter& operator=(const IndexedWriter&) = delete;

  // One document: its tokens and the lengths of its sequences, which sum to the number of tokens. A document
  // without tokens (and without sequences) is legal. A token that the type cannot hold is an error.
  void add_document(std::span<const int32_t> tokens, std::span<const int32_t> sequence_lengths);
  // Many documents whose tokens are already encoded. sequences_per_document[i] consecutive lengths belong to
  // document i.
  void add_encoded(std::span<const std::byte> tokens, std::span<const int32_t> sequence_lengths,
                   std::span<const int32_t> sequences_per_document);

  int64_t documents() const { return documents_; }
  int64_t sequences() const { return sequences_; }
  int64_t tokens() const { return tokens_; }
  TokenType type() const { return type_; }

  // Publishes the dataset. Without `overwrite`, throws ErrorCode::usage if the dataset exists. With a
  // tokenizer, writes its record beside the files (dataset_meta.hpp); without one, removes an existing
  // record.
  void finish(bool overwrite = true, const std::optional<TokenizerRecord>& tokenizer = std::nullopt,
              std::optional<int32_t> end_of_document = std::nullopt);

  // Throws ErrorCode::usage if .bin or .idx of the prefix exist.
  static void refuse_existing(const std::string& prefix);

 private:
  void write_index();
  void remove_temporaries() noexcept;

  std::string prefix_, suffix_;
  TokenType type_;
  std::unique_ptr<FileWriter> bin_, lengths_, boundaries_;
  int64_t documents_ = 0, sequences_ = 0, tokens_ = 0;
};

// Appends one token in the given type; false when it does not fit.
bool append_token(std::string& out, TokenType type, int32_t token);

}  // namespace capstan::data
