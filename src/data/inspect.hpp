// Describes an indexed dataset, for people and for scripts. A tokenizer is optional; with one, samples are
// decoded.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/dataset_meta.hpp"
#include "data/indexed_dataset.hpp"

namespace capstan::data {

struct DatasetReport {
  std::string prefix;
  TokenType type = TokenType::u16;
  int64_t documents = 0, sequences = 0, tokens = 0, bin_bytes = 0, index_bytes = 0;
  int64_t empty_documents = 0;
  // Shortest and longest document, in tokens.
  int64_t shortest = 0, longest = 0;
  double mean = 0;
  // Documents of at least 2^(i-1) and less than 2^i tokens; [0] are the empty ones.
  std::array<int64_t, 64> length_counts{};
  // Set by InspectOptions::scan_tokens, else -1.
  int32_t largest_token = -1;
  // The tokenizer that prepared the data, if it is recorded.
  std::optional<TokenizerRecord> tokenizer;
  // DatasetMeta::end_of_document.
  std::optional<int64_t> end_of_document;
  struct Sample {
    int64_t document;
    // Length of the complete document.
    int64_t tokens;
    // The first token ids of the document.
    std::vector<int32_t> ids;
    // The decoded ids; empty without a tokenizer.
    std::string text;
  };
  std::vector<Sample> samples;
};

struct InspectOptions {
  // Number of documents shown, at even distances in the dataset.
  int64_t samples = 3;
  // Tokens shown of each document.
  int64_t sample_tokens = 32;
  // Reads every token to find the largest id.
  bool scan_tokens = false;
  // Decodes the samples; null: they stay ids. The data must have been prepared with it (TokenizerCheck).
  const text::Tokenizer* tokenizer = nullptr;
  std::string tokenizer_name;
};

// `prefix` may end in .bin or .idx, or lack the `_text_document` that preparation appends. Throws what
// opening an IndexedDataset throws, and ErrorCode::config where the data was prepared with another tokenizer.
// Reads the length of each document, so a damaged index is found.
DatasetReport inspect(const std::string& prefix, const InspectOptions& options = {});

// The report as lines of text, the last of which ends with a line break.
std::string to_text_report(const DatasetReport& report);
// The report as one JSON object.
std::string to_json_report(const DatasetReport& report);

}  // namespace capstan::data
