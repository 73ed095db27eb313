// PREFIX.meta.json beside an indexed dataset: with which tokenizer its text was prepared, and the sizes of
// the files that it describes. `data prepare` writes it; Megatron's .bin and .idx stay as they are. A dataset
// without the file (from another program) has no record.
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
  std::string name;        // as the user gave it, for messages
  std::string identity;    // text::Tokenizer::identity()
  int64_t vocab_size = 0;  // text::Tokenizer::vocab_size()
};
TokenizerRecord record_of(const text::Tokenizer& tokenizer, std::string name);
std::string to_text(const TokenizerRecord& record);  // "tokenizer.json" (4 096 tokens, 0123abcd)

struct DatasetMeta {
  TokenizerRecord tokenizer;
  int64_t documents = 0, sequences = 0, tokens = 0;
};

std::string meta_path(const std::string& prefix);
std::string to_json(const DatasetMeta& meta);  // ends with a line break
// ErrorCode::format: not such a file, written by a newer version, or a value that cannot be; `path` names it.
DatasetMeta parse_meta(std::string_view json, const std::string& path);

// The record of a dataset; nullopt where it has none. ErrorCode::format where the record describes other
// data.
std::optional<DatasetMeta> read_meta(const IndexedDataset& dataset);

// The tokenizer of a run or an inspection, against the data that it reads. Its identity is computed once,
// when a dataset with a record is met.
class TokenizerCheck {
 public:
  // A null tokenizer: only the size of the model's vocabulary is known (0: nothing is).
  TokenizerCheck(const text::Tokenizer* tokenizer, std::string name, int64_t model_vocab_size);

  // The id below which all tokens of a dataset must be; 0: not known.
  int64_t token_limit() const { return limit_; }
  // ErrorCode::config where the dataset was prepared with another tokenizer, or with more tokens than the
  // model has. Without a record: ErrorCode::config where the tokenizer is clearly smaller than the model's
  // vocabulary: by more than 1 %, unless the vocabulary is its size rounded up to a power of two that is at
  // most kMaxMultiple, as published models pad theirs. ErrorCode::format where a token is at or above the
  // limit, of the first kScannedTokens or, in a larger dataset, of as many spread over it; the others are
  // found when they are read.
  void check(const IndexedDataset& dataset);

  static constexpr int64_t kScannedTokens = int64_t{8} << 20;
  static constexpr int64_t kMaxMultiple = 128;

 private:
  void check_vocabulary_gap(const IndexedDataset& dataset) const;
  const text::Tokenizer* tokenizer_;
  std::string name_;
  int64_t model_vocab_size_, limit_;
  std::optional<TokenizerRecord> record_;
};

}  // namespace capstan::data
