#include "data/prepare.hpp"

#include <simdjson.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "data/indexed_writer.hpp"
#include "data/record_problem.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

namespace {

constexpr int64_t kTileBytes = 256 << 10;
constexpr int64_t kBatchBytes = 8 << 20;
// Maximum number of bad records that the result describes.
constexpr size_t kMaxReportedRecords = 20;

// The part of one key's dataset that is made from one tile.
struct EncodedKey {
  // Encoded tokens.
  std::string tokens;
  std::vector<int32_t> sequence_lengths, sequences_per_document;
  int64_t empty_documents = 0, text_bytes = 0;
};
struct EncodedTile {
  std::vector<EncodedKey> keys;
  // Messages "file:line:column: reason".
  std::vector<std::string> bad;
};

// Tokenizes records, one tile at a time. Each worker thread has one.
class TileWorker {
 public:
  TileWorker(const PrepareOptions& options, const EncodeFunction& encode, TokenType type)
      : options_(options), encode_(encode), type_(type) {}

  void run(const RecordBatch& batch, const std::vector<InputFile>& files, size_t begin, size_t end,
           EncodedTile& out) {
    out.keys.assign(options_.json_keys.size(), {});
    out.bad.clear();
    for (size_t i = begin; i < end; ++i) {
      const Record& record = batch.records[i];
      const auto text = batch.of(record);
      const auto& path = files[static_cast<size_t>(record.file)].path;
      try {
        if (const auto problem = add(record, text, out))
          out.bad.push_back(location_of(record, text, problem->byte, path) + ": " + problem->reason);
      } catch (Error& error) {
        throw error.in("while tokenizing " + location_of(record, text, 0, path));
      }
      if (!out.bad.empty() && options_.on_bad_line == OnBadLine::fail) return;
    }
  }

 private:
  std::optional<RecordProblem> add(const Record& record, std::string_view text, EncodedTile& out) {
    if (!record.problem.empty()) return RecordProblem{0, record.problem};
    if (!record.json) {
      if (const auto at = first_invalid_utf8(text)) return RecordProblem{*at, "invalid UTF-8"};
      add_document({&text, 1}, out.keys[0]);
      return std::nullopt;
    }
    simdjson::dom::element root;
    // The batch has readable bytes after each record, so the record need not be copied.
    if (const auto error = parser_.parse(text.data(), text.size(), false).get(root))
      return json_problem(text, error);
    simdjson::dom::object object;
    if (root.get(object))
      return RecordProblem{0, "expected an object, not " + std::string(kind_of(root.type()))};
    // All keys are checked before any is tokenized, so that a bad record adds nothing to any dataset.
    values_.assign(options_.json_keys.size(), {});
    for (size_t k = 0; k < options_.json_keys.size(); ++k)
      if (auto problem = strings_of(object, options_.json_keys[k], values_[k])) return problem;
    for (size_t k = 0; k < options_.json_keys.size(); ++k) add_document(values_[k], out.keys[k]);
    return std::nullopt;
  }

  static std::optional<RecordProblem> strings_of(simdjson::dom::object object, const std::string& key,
                                                 std::vector<std::string_view>& strings) {
    std::optional<simdjson::dom::element> value;
    // The last one of equal keys counts, as in Python.
    for (const auto field : object)
      if (field.key == key) value = field.value;
    if (!value) return RecordProblem{0, "no key `" + key + "`"};
    std::string_view text;
    if (!value->get(text)) {
      strings.push_back(text);
      return std::nullopt;
    }
    simdjson::dom::array list;
    if (value->get(list))
      return RecordProblem{0, "key `" + key + "` is " + std::string(kind_of(value->type())) +
                                  ", not a string or a list of strings"};
    for (const auto item : list) {
      if (item.get(text))
        return RecordProblem{0, "key `" + key + "` is a list with " + std::string(kind_of(item.type())) +
                                    " in it, not only strings"};
      strings.push_back(text);
    }
    return std::nullopt;
  }

  void add_document(std::span<const std::string_view> sentences, EncodedKey& out) {
    int32_t sequences = 0;
    for (const auto sentence : sentences) {
      ids_.clear();
      encode_(sentence, ids_);
      out.text_bytes += static_cast<int64_t>(sentence.size());
      if (ids_.empty()) continue;
      if (ids_.size() >= size_t{INT32_MAX})
        fail(ErrorCode::format, "a sequence of 2^31 tokens or more cannot be stored");
      for (const int32_t id : ids_) put(id, out);
      out.sequence_lengths.push_back(static_cast<int32_t>(ids_.size()));
      ++sequences;
    }
    if (sequences > 0 && options_.append_eod) {
      put(*options_.eod, out);
      ++out.sequence_lengths.back();
    }
    if (sequences == 0) ++out.empty_documents;
    out.sequences_per_document.push_back(sequences);
  }

  void put(int32_t id, EncodedKey& out) const {
    if (!append_token(out.tokens, type_, id))
      fail(ErrorCode::internal, "the tokenizer of " + std::to_string(options_.vocab_size) +
                                    " tokens gave token " + std::to_string(id) + ", which " +
                                    std::string(name_of(type_)) + " cannot hold");
  }

  const PrepareOptions& options_;
  const EncodeFunction& encode_;
  TokenType type_;
  simdjson::dom::parser parser_;
  std::vector<std::vector<std::string_view>> values_;
  std::vector<int32_t> ids_;
};

// Returns the indices at which tiles of consecutive records, about kTileBytes each, begin, and the end.
std::vector<size_t> tiles_of(const RecordBatch& batch) {
  std::vector<size_t> begins;
  int64_t bytes = kTileBytes;
  for (size_t i = 0; i < batch.records.size(); ++i) {
    if (bytes >= kTileBytes) {
      begins.push_back(i);
      bytes = 0;
    }
    bytes += static_cast<int64_t>(batch.records[i].length) + 1;
  }
  begins.push_back(batch.records.size());
  return begins;
}

void check(const PrepareOptions& options) {
  if (options.json_keys.empty()) fail(ErrorCode::usage, "no JSON key to take the text from");
  for (const auto& key : options.json_keys) {
    if (key.empty() || key.find('/') != std::string::npos)
      fail(ErrorCode::usage, "the JSON key `" + key + "` cannot be part of a file name");
    if (std::count(options.json_keys.begin(), options.json_keys.end(), key) > 1)
      fail(ErrorCode::usage, "the JSON key `" + key + "` is given twice");
  }
  if (options.output_prefix.empty() || options.output_prefix.ends_with('/'))
    fail(ErrorCode::usage, "the output prefix `" + options.output_prefix + "` does not end in a name");
  if (options.append_eod && !options.eod)
    fail(ErrorCode::usage, "the tokenizer has no end-of-document token to append",
         "name one, or leave append_eod out");
}

// One writer for each key.
using Writers = std::vector<std::unique_ptr<IndexedWriter>>;

void append(const EncodedTile& tile, const PrepareOptions& options, const Writers& writers,
            PrepareResult& result) {
  if (!tile.bad.empty() && options.on_bad_line == OnBadLine::fail)
    fail(ErrorCode::format, tile.bad[0], "{skip_bad_lines}");
  for (const auto& report : tile.bad)
    if (result.reports.size() < kMaxReportedRecords) result.reports.push_back(report);
  result.skipped += static_cast<int64_t>(tile.bad.size());
  for (size_t k = 0; k < writers.size(); ++k) {
    const EncodedKey& of = tile.keys[k];
    writers[k]->add_encoded(std::as_bytes(std::span(of.tokens.data(), of.tokens.size())), of.sequence_lengths,
                            of.sequences_per_document);
    result.keys[k].empty_documents += of.empty_documents;
    result.keys[k].text_bytes += of.text_bytes;
  }
}

PrepareProgress progress_of(const PrepareResult& result, const Writers& writers, int64_t file_bytes_total) {
  PrepareProgress now;
  now.documents = writers[0]->documents();
  for (size_t k = 0; k < writers.size(); ++k) {
    now.tokens += writers[k]->tokens();
    now.text_bytes += result.keys[k].text_bytes;
  }
  now.skipped = result.skipped;
  now.file_bytes = result.file_bytes;
  now.file_bytes_total = std::max(file_bytes_total, now.file_bytes);
  now.seconds = result.seconds;
  now.text_bytes_per_second = static_cast<double>(now.text_bytes) / std::max(now.seconds, 1e-9);
  now.seconds_left = now.seconds * static_cast<double>(now.file_bytes_total - now.file_bytes) /
                     static_cast<double>(std::max<int64_t>(now.file_bytes, 1));
  return now;
}

}  // namespace

PrepareResult prepare(const PrepareOptions& options, const EncodeFunction& encode, ThreadPool& pool) {
  check(options);
  const auto start = std::chrono::steady_clock::now();
  RecordReader reader(expand_inputs(options.inputs), options.records);
  PrepareResult result;
  result.type = token_type_for_vocab(options.vocab_size);
  result.files = static_cast<int64_t>(reader.files().size());

  if (const std::filesystem::path parent = std::filesystem::path(options.output_prefix).parent_path();
      !parent.empty()) {
    // Ignores errors; the creation of the first file reports them.
    std::error_code error;
    std::filesystem::create_directories(parent, error);
  }
  Writers writers;
  for (const auto& key : options.json_keys) {
    result.keys.push_back({key, options.output_prefix + "_" + key + "_document"});
    if (!options.overwrite) IndexedWriter::refuse_existing(result.keys.back().prefix);
    writers.push_back(std::make_unique<IndexedWriter>(result.keys.back().prefix, result.type));
  }
  std::vector<std::unique_ptr<TileWorker>> workers;
  for (int i = 0; i < pool.size(); ++i)
    workers.push_back(std::make_unique<TileWorker>(options, encode, result.type));

  const int64_t batch_bytes = std::max(kBatchBytes, 4 * kTileBytes * pool.size());
  auto batch = std::make_unique<RecordBatch>(), following = std::make_unique<RecordBatch>();
  std::vector<EncodedTile> encoded;
  bool more = reader.next(*batch, batch_bytes);
  while (more) {
    // The next batch is read while this one is tokenized.
    std::future<bool> reading;
    if (!reader.at_end())
      reading = std::async(std::launch::async, [&] { return reader.next(*following, batch_bytes); });
    const auto tiles = tiles_of(*batch);
    if (encoded.size() < tiles.size()) encoded.resize(tiles.size());
    pool.parallel_for(static_cast<int64_t>(tiles.size()) - 1, [&](int64_t tile, int worker) {
      const auto at = static_cast<size_t>(tile);
      workers[static_cast<size_t>(worker)]->run(*batch, reader.files(), tiles[at], tiles[at + 1],
                                                encoded[at]);
    });
    for (size_t tile = 0; tile + 1 < tiles.size(); ++tile) append(encoded[tile], options, writers, result);
    result.records += static_cast<int64_t>(batch->records.size());
    result.file_bytes = batch->file_bytes;
    result.seconds = seconds_since(start);
    if (options.progress) options.progress(progress_of(result, writers, reader.file_bytes_total()));
    more = reading.valid() && reading.get();
    std::swap(batch, following);
  }
  if (writers[0]->documents() == 0)
    fail(ErrorCode::format,
         "the input holds no document" + (result.skipped > 0
                                              ? ": all " + std::to_string(result.skipped) +
                                                    " records are bad, the first is " + result.reports[0]
                                              : std::string{}));
  for (size_t k = 0; k < writers.size(); ++k) {
    result.keys[k].documents = writers[k]->documents();
    result.keys[k].sequences = writers[k]->sequences();
    result.keys[k].tokens = writers[k]->tokens();
    writers[k]->finish(options.overwrite, options.tokenizer, options.append_eod ? options.eod : std::nullopt);
  }
  result.html_pages = reader.html_pages();
  result.seconds = seconds_since(start);
  return result;
}

PrepareResult prepare(PrepareOptions options, const text::Tokenizer& tokenizer, const std::string& name,
                      ThreadPool& pool) {
  options.tokenizer = record_of(tokenizer, name);
  options.vocab_size = tokenizer.vocab_size();
  if (options.append_eod && !options.eod) options.eod = tokenizer.eod();
  return prepare(
      options, [&](std::string_view text, std::vector<int32_t>& ids) { tokenizer.encode(text, ids); }, pool);
}

}  // namespace capstan::data
