// Fine-tuning data as a run sees them, for people and for scripts: rows, where documents begin in them, which
// tokens are learned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/sft_dataset.hpp"

namespace capstan::data {

struct SftReport {
  std::string summary;  // SftDataset::summary()
  SftCounts counts;
  int64_t rows = 0, row_length = 0;  // of the first epoch
  struct Document {
    std::string location;             // "file:line"
    int64_t begin = 0;                // first position in the row
    int64_t tokens = 0, learned = 0;  // of the whole document
    std::vector<int32_t> ids;         // its beginning
    std::vector<bool> loss;           // of each id: it is learned
    struct Run {
      std::string text;
      bool learned;
    };
    std::vector<Run> runs;  // the ids as text, split where learning begins and ends
  };
  struct Row {
    int64_t number = 0;
    int64_t filled = 0;  // places that hold a token of a document
    std::vector<Document> documents;
  };
  std::vector<Row> shown;
};

// The first documents of up to `count` rows, spread over the first epoch, so that at least `count` documents
// are shown where there are as many, with up to `tokens` tokens of each. Others have their places alone.
SftReport inspect_sft(const SftDataset& dataset, const text::Tokenizer& tokenizer, int64_t count,
                      int64_t tokens);

// What is learned is green, or without colors between ⟦ and ⟧; control characters are shown, not sent.
std::string to_text_report(const SftReport& report, bool color);
std::string to_json_report(const SftReport& report);  // one JSON object

}  // namespace capstan::data
