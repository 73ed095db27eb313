// What an indexed dataset holds, for people and for scripts. No tokenizer needed; with one, samples are
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
  int64_t shortest = 0, longest = 0;  // tokens of a document
  double mean = 0;
  // Documents of at least 2^(i-1) and less than 2^i tokens; [0] are the empty ones.
  std::array<int64_t, 64> length_counts{};
  int32_t largest_token = -1;                // -1 unless asked for
  std::optional<TokenizerRecord> tokenizer;  // that the data was prepared with, where that is recorded
  struct Sample {
    int64_t document;
    int64_t tokens;            // of the whole document
    std::vector<int32_t> ids;  // its beginning
    std::string text;          // decoded, if there is a tokenizer
  };
  std::vector<Sample> samples;
};

struct InspectOptions {
  int64_t samples = 3;         // documents shown, spread evenly over the dataset
  int64_t sample_tokens = 32;  // of each
  bool scan_tokens = false;    // read every token: finds the largest one
  // Decodes the samples; null: they stay ids. The data must have been prepared with it (TokenizerCheck).
  const text::Tokenizer* tokenizer = nullptr;
  std::string tokenizer_name;
};

// `prefix` may end in .bin or .idx, or lack the `_text_document` that preparation appends. Throws what
// opening an IndexedDataset throws, and ErrorCode::config where the data was prepared with another tokenizer.
// Reads the length of each document, so a damaged index is found.
DatasetReport inspect(const std::string& prefix, const InspectOptions& options = {});

std::string to_text_report(const DatasetReport& report);  // several lines, ends with a line break
std::string to_json_report(const DatasetReport& report);  // one JSON object

}  // namespace capstan::data
