// Describes fine-tuning data as a run reads them, for people and for scripts: rows, the documents in them,
// and the tokens that count in the loss.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/sft_dataset.hpp"

namespace capstan::data {

struct SftReport {
  // The text of SftDataset::summary().
  std::string summary;
  SftCounts counts;
  // Number of rows in the first epoch, and tokens per row.
  int64_t rows = 0, row_length = 0;
  struct Document {
    // Location of the record, "file:line".
    std::string location;
    // First position in the row.
    int64_t begin = 0;
    // Counts over the complete document.
    int64_t tokens = 0, loss_tokens = 0;
    // The first token ids of the document.
    std::vector<int32_t> ids;
    // Whether each id counts in the loss.
    std::vector<bool> loss;
    struct Segment {
      std::string text;
      bool in_loss;
    };
    // The text of `ids`, split where the loss mask changes.
    std::vector<Segment> segments;
  };
  struct Row {
    int64_t number = 0;
    // Positions that hold a token of a document.
    int64_t filled = 0;
    std::vector<Document> documents;
  };
  std::vector<Row> shown;
};

// The first documents of up to `count` rows, at even distances in the first epoch. At least `count` documents
// are shown if there are as many, with up to `tokens` tokens of each. Further documents have their location
// and no tokens.
SftReport inspect_sft(const SftDataset& dataset, const text::Tokenizer& tokenizer, int64_t count,
                      int64_t tokens);

// Tokens that count in the loss are green or, without color, enclosed in ⟦ and ⟧. Control characters are
// escaped.
std::string to_text_report(const SftReport& report, bool color);
// The report as one JSON object.
std::string to_json_report(const SftReport& report);

}  // namespace capstan::data
