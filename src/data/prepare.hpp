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
  // Bytes of the input files as stored on disk, and bytes of decompressed text.
  int64_t file_bytes = 0, file_bytes_total = 0;
  int64_t text_bytes = 0;
  double seconds = 0, text_bytes_per_second = 0, seconds_left = 0;
};

struct PrepareOptions {
  // Files and directories, in this order.
  std::vector<std::string> inputs;
  std::string output_prefix;
  std::vector<std::string> json_keys = {"text"};
  RecordOptions records;
  bool append_eod = false;
  // End-of-document token, required by append_eod.
  std::optional<int32_t> eod;
  // Decides the token type (token_type_for_vocab).
  int64_t vocab_size = 0;
  // Tokenizer that is recorded beside each dataset.
  std::optional<TokenizerRecord> tokenizer;
  // Replaces existing datasets.
  bool overwrite = false;
  OnBadLine on_bad_line = OnBadLine::fail;
  // Called between batches, from the calling thread.
  std::function<void(const PrepareProgress&)> progress;
};

struct PreparedKey {
  // The JSON key, and the dataset's prefix without .bin/.idx.
  std::string key, prefix;
  int64_t documents = 0, sequences = 0, tokens = 0, empty_documents = 0, text_bytes = 0;
};
struct PrepareResult {
  std::vector<PreparedKey> keys;
  TokenType type = TokenType::u16;
  int64_t files = 0, records = 0, skipped = 0, file_bytes = 0;
  // "file:line:column: reason" of the first skipped records.
  std::vector<std::string> reports;
  HtmlPages html_pages;
  double seconds = 0;
};

// Throws ErrorCode::usage, before it reads any input, if an output exists and `overwrite` is false. Creates
// files under the output names only if it succeeds. Throws ErrorCode::format for a bad record under
// OnBadLine::fail ("file:line:column: reason", the first in the order of the input) and for input without a
// document.
PrepareResult prepare(const PrepareOptions& options, const EncodeFunction& encode, ThreadPool& pool);
// The same with a tokenizer: sets `tokenizer` (recorded under `name`) and `vocab_size` of the options. The
// appended end-of-document token is `eod` of the options, else the tokenizer's own (ErrorCode::usage where it
// has none).
PrepareResult prepare(PrepareOptions options, const text::Tokenizer& tokenizer, const std::string& name,
                      ThreadPool& pool);

}  // namespace capstan::data
