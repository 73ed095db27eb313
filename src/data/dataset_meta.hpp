// PREFIX.meta.json beside an indexed dataset records the tokenizer that prepared its text, the token that
// ends its documents, and the sizes of the files that it describes. `data prepare` writes it; Megatron's
// .bin and .idx stay as they are. A dataset without the file (from another program) has no record.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace capstan::text {
class Tokenizer;
}

namespace capstan::data {

class IndexedDataset;

struct TokenizerRecord {
  // The path that the user gave, for messages.
  std::string name;
  // text::Tokenizer::identity().
  std::string identity;
  // text::Tokenizer::vocab_size().
  int64_t vocab_size = 0;
};
TokenizerRecord record_of(const text::Tokenizer& tokenizer, std::string name);
// A text such as: "tokenizer.json" (4 096 tokens, 0123abcd)
std::string to_text(const TokenizerRecord& record);

struct DatasetMeta {
  TokenizerRecord tokenizer;
  int64_t documents = 0, sequences = 0, tokens = 0;
  // The token that was appended to each document; kNone: none was. Nullopt: the record is of an earlier
  // version, which does not say.
  std::optional<int64_t> end_of_document;
  static constexpr int64_t kNone = -1;
};

std::string meta_path(const std::string& prefix);
// The content of PREFIX.meta.json, which ends with a line break.
std::string to_json(const DatasetMeta& meta);
// Parses the content of a meta file. Throws ErrorCode::format, with `path`, for malformed content, a newer
// version or an invalid value.
DatasetMeta parse_meta(std::string_view json, const std::string& path);

// Reads the record of a dataset; returns nullopt if it has none. Throws ErrorCode::format if the record
// describes other data.
std::optional<DatasetMeta> read_meta(const IndexedDataset& dataset);

// Compares the tokenizer of a run or an inspection with the data that it reads. Computes the tokenizer's
// identity once, for the first dataset that has a record.
class TokenizerCheck {
 public:
  // tokenizer: null if only the size of the model's vocabulary is known. model_vocab_size: 0 if unknown.
  TokenizerCheck(const text::Tokenizer* tokenizer, std::string name, int64_t model_vocab_size);

  // All token ids of a dataset must be below this limit; 0: unknown.
  int64_t token_limit() const { return limit_; }
  // ErrorCode::config where the dataset was prepared with another tokenizer (without one: than an earlier
  // dataset), or with more tokens than the model has. Without a record: ErrorCode::config where the
  // tokenizer is clearly smaller than the model's vocabulary: by more than 1 %, unless the vocabulary is its
  // size rounded up to a power of two that is at most kMaxMultiple, as published models pad theirs.
  // ErrorCode::format where a token is at or above the limit, of the first kScannedTokens or, in a larger
  // dataset, of as many at even distances; the others are found when they are read.
  void check(const IndexedDataset& dataset);

  static constexpr int64_t kScannedTokens = int64_t{8} << 20;
  static constexpr int64_t kMaxMultiple = 128;

 private:
  void check_vocabulary_gap(const IndexedDataset& dataset) const;
  const text::Tokenizer* tokenizer_;
  std::string name_;
  int64_t model_vocab_size_, limit_;
  // The tokenizer's; without one, that of the first dataset that has a record.
  std::optional<TokenizerRecord> record_;
};

}  // namespace capstan::data
