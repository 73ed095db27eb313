// Splits input files into records, in order and in batches. A record is a JSON value (one per line, or an
// element of one array) or a document of plain text. The reader finds where records begin and end; prepare
// reads the JSON values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/missing.hpp"
#include "data/input_reader.hpp"

namespace capstan::data {

enum class InputFormat : uint8_t {
  // Chosen by the name without .gz or .zst: .json .jsonl .ndjson are JSON, everything else text.
  automatic,
  // An array when its first character is `[`, else a value on each line.
  json,
  text,
};
enum class TextSplit : uint8_t {
  // blank_line for a file that was named, file for one found in a directory.
  automatic,
  // Documents are separated by blank lines.
  blank_line,
  // Documents are separated by lines that consist of the separator (`%` in fortune files).
  separator,
  // Each file is one document.
  file,
};

struct RecordOptions {
  InputFormat format = InputFormat::automatic;
  TextSplit split = TextSplit::automatic;
  std::string separator = "%";
  // Longer records are bad records.
  int64_t max_record_bytes = int64_t{256} << 20;
  InputLimits limits;
};

struct InputFile {
  std::string path;
  bool from_directory = false;
};
// Files as named; a directory stands for all regular files below it, sorted by path, without hidden ones and
// symbolic links. ErrorCode::not_found for a name that does not exist, ::format if nothing is left.
std::vector<InputFile> expand_inputs(const std::vector<std::string>& names);

struct Record {
  // Byte range in RecordBatch::text.
  size_t offset, length;
  // Index of the input file.
  int32_t file;
  // Line, from 1, where the record begins.
  int64_t line;
  // Column in characters, from 1, where the record begins.
  int64_t column;
  // True: a JSON record; false: a line of text.
  bool json;
  // Why the record could not be separated, in which case it has no text; else empty.
  std::string problem;
};

struct RecordBatch {
  // The records; 64 readable bytes follow the last one.
  std::string text;
  std::vector<Record> records;
  // Bytes read so far from all files, as stored on disk.
  int64_t file_bytes = 0;
  std::string_view of(const Record& record) const {
    return std::string_view(text).substr(record.offset, record.length);
  }
};

class RecordReader {
 public:
  RecordReader(std::vector<InputFile> files, RecordOptions options);
  ~RecordReader();

  // Replaces the batch by the next records, about target_bytes of them (at least one). False at the end.
  // Throws ErrorCode::format for errors that end the file: broken compression, or an array that is malformed.
  bool next(RecordBatch& batch, int64_t target_bytes);

  // True when next() would return false. May be false at the end until next() was called.
  bool at_end() const;

  const std::vector<InputFile>& files() const;
  // The files opened so far that should hold plain text and begin as an HTML page.
  const HtmlPages& html_pages() const;
  // Bytes of all files, as stored on disk.
  int64_t file_bytes_total() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
