// Text → indexed datasets: reads records, tokenizes them on all threads, writes
// PREFIX_<key>_document.bin/.idx. The bytes depend on the input, the tokenizer and the options; not on the
// number of threads.
//
// Semantics of Megatron's preprocess_data.py: a value is a string, or a list of strings, each of which
// becomes one sequence of the document; a string without tokens adds no sequence; the end-of-document token
// joins the last sequence of a document that has tokens; a document without tokens is kept as an empty one.
// Plain text has the one key `text`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.hpp"
#include "data/dataset_meta.hpp"
#include "data/indexed_dataset.hpp"
#include "data/record_reader.hpp"

namespace capstan::data {

// Replaces or extends `ids`, which is empty, by the tokens of `text`, special tokens not added. Called from
// many threads.
using EncodeFunction = std::function<void(std::string_view text, std::vector<int32_t>& ids)>;

enum class OnBadLine : uint8_t { fail, skip };

struct PrepareProgress {
  int64_t documents = 0, tokens = 0, skipped = 0;
  int64_t file_bytes = 0, file_bytes_total = 0;  // as stored on disk
  int64_t text_bytes = 0;                        // decompressed
  double seconds = 0, text_bytes_per_second = 0, seconds_left = 0;
};

struct PrepareOptions {
  std::vector<std::string> inputs;  // files and directories, in this order
  std::string output_prefix;
  std::vector<std::string> json_keys = {"text"};
  RecordOptions records;
  bool append_eod = false;
  std::optional<int32_t> eod;                // required by append_eod
  int64_t vocab_size = 0;                    // decides the token type (token_type_for_vocab)
  std::optional<TokenizerRecord> tokenizer;  // recorded beside each dataset
  bool overwrite = false;                    // replace datasets that are there
  OnBadLine on_bad_line = OnBadLine::fail;
  int64_t max_reports = 20;                              // bad records described in the result
  std::function<void(const PrepareProgress&)> progress;  // called between batches, from the calling thread
};

struct PreparedKey {
  std::string key, prefix;  // prefix: of the dataset, without .bin/.idx
  int64_t documents = 0, sequences = 0, tokens = 0, empty_documents = 0, text_bytes = 0;
};
struct PrepareResult {
  std::vector<PreparedKey> keys;
  TokenType type = TokenType::u16;
  int64_t files = 0, records = 0, skipped = 0, file_bytes = 0;
  std::vector<std::string> reports;  // "file:line:column: reason" of the first skipped records
  double seconds = 0;
};

// ErrorCode::usage, before anything is read, where an output exists and is not to be overwritten. Nothing
// appears under the output names unless all went well. ErrorCode::format for a bad record under
// OnBadLine::fail ("file:line:column: reason", the first in the order of the input) and for input without a
// single document.
PrepareResult prepare(const PrepareOptions& options, const EncodeFunction& encode, ThreadPool& pool);
// The same with a tokenizer: sets `tokenizer` (recorded under `name`) and `vocab_size` of the options. The
// appended end-of-document token is `eod` of the options, else the tokenizer's own (ErrorCode::usage where it
// has none).
PrepareResult prepare(PrepareOptions options, const text::Tokenizer& tokenizer, const std::string& name,
                      ThreadPool& pool);

}  // namespace capstan::data
