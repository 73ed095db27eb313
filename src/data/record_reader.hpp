// Splits input files into records, in order and in batches. A record is a JSON value (one per line, or an
// element of one array) or a document of plain text. The reader finds where records begin and end; prepare
// reads the JSON values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/input_stream.hpp"

namespace capstan::data {

enum class InputFormat : uint8_t {
  automatic,  // by name, .gz and .zst aside: .json .jsonl .ndjson are JSON, everything else text
  json,       // an array when its first character is `[`, else a value on each line
  text,
};
enum class TextSplit : uint8_t {
  automatic,   // blank_line for a file that was named, file for one found in a directory
  blank_line,  // documents are separated by blank lines
  separator,   // … by lines that consist of the separator (`%` in fortune files)
  file,        // a file is a document
};

struct RecordOptions {
  InputFormat format = InputFormat::automatic;
  TextSplit split = TextSplit::automatic;
  std::string separator = "%";
  int64_t max_record_bytes = int64_t{256} << 20;  // a longer one is a bad record
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
  size_t offset, length;  // in RecordBatch::text
  int32_t file;           // index of the input file
  int64_t line;           // from 1, where the record begins
  int64_t column;         // from 1, in characters
  bool json;              // else text
  // Not empty: the record could not be separated, and why; it has no text then.
  std::string problem;
};

struct RecordBatch {
  std::string text;  // the records; 64 readable bytes follow the last one
  std::vector<Record> records;
  int64_t file_bytes = 0;  // read so far from all files, as stored on disk
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
  int64_t file_bytes_total() const;  // of all files, as stored on disk

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
