#include "data/record_reader.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::data {

namespace fs = std::filesystem;

namespace {

constexpr size_t kBuffer = 256 << 10;
// Number of bytes that a parser may read beyond a record (SIMDJSON_PADDING).
constexpr size_t kPadding = 64;

bool all_blank(std::string_view text) {
  return std::all_of(text.begin(), text.end(), is_blank);
}

InputFormat format_by_name(std::string_view name) {
  for (const std::string_view packed : {".gz", ".zst"})
    if (name.ends_with(packed)) name.remove_suffix(packed.size());
  for (const std::string_view json : {".json", ".jsonl", ".ndjson"})
    if (name.ends_with(json)) return InputFormat::json;
  return InputFormat::text;
}

void add_directory(const fs::path& directory, std::vector<InputFile>& files) {
  std::vector<std::string> found;
  std::error_code error;
  fs::recursive_directory_iterator entry(directory, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with('.')) {
      if (entry->is_directory()) entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_symlink() && entry->is_regular_file()) found.push_back(entry->path().string());
  }
  if (error) fail(ErrorCode::io, "cannot list directory `" + directory.string() + "`: " + error.message());
  std::sort(found.begin(), found.end());
  for (auto& path : found) files.push_back({std::move(path), true});
}

}  // namespace

std::vector<InputFile> expand_inputs(const std::vector<std::string>& names) {
  std::vector<InputFile> files;
  for (const auto& name : names) {
    std::error_code error;
    const auto status = fs::status(name, error);
    if (status.type() == fs::file_type::none)
      fail(ErrorCode::io, "cannot read `" + name + "`: " + error.message());
    if (status.type() == fs::file_type::not_found) fail_not_found("file", name, {}, HubKind::dataset);
    if (fs::is_directory(status))
      add_directory(name, files);
    else if (fs::is_regular_file(status))
      files.push_back({name, false});
    else
      fail(ErrorCode::format,
           "`" + name + "` is " + std::string(special_file_kind(name)) + ", neither a file nor a directory");
  }
  if (files.empty()) fail(ErrorCode::format, "`" + join(names, "`, `") + "` holds no file to read");
  return files;
}

struct RecordReader::State {
  std::vector<InputFile> files;
  RecordOptions options;
  HtmlPages html_pages;

  // Index of the open file.
  int32_t file = -1;
  std::optional<InputReader> reader;
  bool json = false;
  TextSplit split = TextSplit::file;
  std::unique_ptr<char[]> memory = std::make_unique_for_overwrite<char[]>(kBuffer);
  std::span<char> buffer{memory.get(), kBuffer};
  // Unread bytes of the buffer.
  size_t begin = 0, end = 0;
  // Location of the next byte; the column is kept where JSON is split.
  int64_t line = 1, column = 1;
  int64_t done_bytes = 0, total_bytes = 0;
  enum class Array { none, before_element, after_element, closed } array = Array::none;
  bool first_element = true;

  RecordBatch* batch = nullptr;

  // --- bytes

  bool fill() {
    if (begin < end) return true;
    begin = 0;
    end = reader->read(buffer);
    return end > 0;
  }
  [[noreturn]] void bad(int64_t at_line, int64_t at_column, const std::string& what) const {
    fail(ErrorCode::format, files[static_cast<size_t>(file)].path + ":" + std::to_string(at_line) + ":" +
                                std::to_string(at_column) + ": " + what);
  }

  void open(int32_t index) {
    file = index;
    const InputFile& input = files[static_cast<size_t>(index)];
    reader.emplace(input.path, options.limits);
    begin = end = 0;
    line = column = 1;
    array = Array::none;
    first_element = true;
    const InputFormat format =
        options.format == InputFormat::automatic ? format_by_name(input.path) : options.format;
    json = format == InputFormat::json;
    split = options.split != TextSplit::automatic ? options.split
            : input.from_directory                ? TextSplit::file
                                                  : TextSplit::blank_line;
    // The first read is short only if the file is, so a byte order mark is always complete in it.
    if (!fill()) return;
    while (end < 3) {
      const size_t more = reader->read(buffer.subspan(end));
      if (more == 0) break;
      end += more;
    }
    if (std::string_view(buffer.data(), end).starts_with(kByteOrderMark)) begin = kByteOrderMark.size();
    const std::string_view beginning(buffer.data() + begin, end - begin);
    if (!json) return html_pages.look(beginning, input.path);
    refuse_placeholder(beginning, input.path);
    // A file whose first character is `[` is an array.
    while (fill() && is_blank(buffer[begin])) take();
    if (begin < end && buffer[begin] == '[') {
      take();
      array = Array::before_element;
    }
  }

  // Reads to the next line break (not included) and appends to the batch's text. Returns false at the end of
  // the file if there is no further byte. Sets `truncated` if the line is longer than allowed and only its
  // beginning was kept.
  bool take_line(size_t start, bool& truncated, bool& ended_by_break) {
    bool any = false;
    truncated = ended_by_break = false;
    while (fill()) {
      any = true;
      const char* from = buffer.data() + begin;
      const auto* at = static_cast<const char*>(std::memchr(from, '\n', end - begin));
      const size_t count = at ? static_cast<size_t>(at - from) : end - begin;
      if (batch->text.size() - start + count > static_cast<size_t>(options.max_record_bytes))
        truncated = true;
      else if (!truncated)
        batch->text.append(from, count);
      begin += count;
      if (at) {
        ++begin;
        ended_by_break = true;
        break;
      }
    }
    return any;
  }

  void emit(size_t start, int64_t at_line, int64_t at_column) {
    batch->records.push_back({start, batch->text.size() - start, file, at_line, at_column, json, {}});
  }
  void emit_too_long(size_t start, int64_t at_line, int64_t at_column) {
    batch->text.resize(start);
    batch->records.push_back({start, 0, file, at_line, at_column, json,
                              "longer than " + human_bytes(static_cast<double>(options.max_record_bytes)) +
                                  ", the limit for one document"});
  }

  // --- one record of each kind; false at the end of the file

  bool next_json_line() {
    for (;;) {
      const size_t start = batch->text.size();
      bool truncated, ended;
      if (!take_line(start, truncated, ended)) return false;
      const int64_t at = line++, at_column = column;
      column = 1;
      if (truncated) {
        emit_too_long(start, at, at_column);
        return true;
      }
      if (!all_blank(std::string_view(batch->text).substr(start))) {
        emit(start, at, at_column);
        return true;
      }
      batch->text.resize(start);
    }
  }

  char take() {
    const char c = buffer[begin++];
    if (c == '\n')
      ++line, column = 1;
    else if (!is_continuation(c))
      ++column;
    return c;
  }

  // Moves to the first character of the next element; false at the end of the array.
  bool find_element() {
    for (;;) {
      if (!fill()) {
        if (array == Array::closed) return false;
        bad(line, column, "the JSON array is not closed");
      }
      if (is_blank(buffer[begin])) {
        take();
        continue;
      }
      const char c = buffer[begin];
      if (array == Array::closed) bad(line, column, "there is more after the JSON array");
      if (array == Array::after_element) {
        if (c != ',' && c != ']') bad(line, column, "expected `,` or `]` after an element of the JSON array");
        array = c == ',' ? Array::before_element : Array::closed;
        take();
        first_element = false;
        continue;
      }
      if (c == ']' && first_element) {
        array = Array::closed;
        take();
        continue;
      }
      if (c == ',' || c == ']') bad(line, column, "expected an element of the JSON array");
      return true;
    }
  }

  bool next_element() {
    if (!find_element()) return false;
    const size_t start = batch->text.size();
    const int64_t at_line = line, at_column = column;
    int64_t depth = 0;
    bool in_string = false, escaped = false, truncated = false;
    for (;;) {
      if (!fill()) bad(at_line, at_column, "the JSON array ends inside the element that begins here");
      const char c = buffer[begin];
      // A number or a word ends before the next character; every other element ends with its own last
      // character.
      if (!in_string && depth == 0 && (c == ',' || c == ']' || is_blank(c))) break;
      take();
      if (!truncated) batch->text.push_back(c);
      if (static_cast<int64_t>(batch->text.size() - start) > options.max_record_bytes) truncated = true;
      if (in_string) {
        if (escaped)
          escaped = false;
        else if (c == '\\')
          escaped = true;
        else if (c == '"')
          in_string = false;
        if (!in_string && depth == 0) break;
      } else if (c == '"') {
        in_string = true;
      } else if (c == '{' || c == '[') {
        ++depth;
      } else if (c == '}' || c == ']') {
        if (--depth < 0) bad(line, column - 1, "a closing bracket without an opening one");
        if (depth == 0) break;
      }
    }
    array = Array::after_element;
    if (truncated)
      emit_too_long(start, at_line, at_column);
    else
      emit(start, at_line, at_column);
    return true;
  }

  bool next_text() {
    const size_t start = batch->text.size();
    int64_t at_line = line;
    if (split == TextSplit::file) {
      bool truncated = false, any = false;
      while (fill()) {
        any = true;
        if (batch->text.size() - start + (end - begin) > static_cast<size_t>(options.max_record_bytes))
          truncated = true;
        else if (!truncated)
          batch->text.append(buffer.data() + begin, end - begin);
        begin = end;
      }
      if (!any) return false;
      if (truncated)
        emit_too_long(start, at_line, 1);
      else if (all_blank(std::string_view(batch->text).substr(start)))
        batch->text.resize(start);
      else
        emit(start, at_line, 1);
      return true;
    }
    bool too_long = false;
    for (;;) {
      const size_t line_start = batch->text.size();
      bool truncated, ended;
      const bool any = take_line(start, truncated, ended);
      if (any) ++line;
      too_long |= truncated;
      std::string_view text = std::string_view(batch->text).substr(line_start);
      if (text.ends_with('\r')) text.remove_suffix(1);
      const bool boundary =
          !any ||
          (!truncated &&
           (split == TextSplit::blank_line ? all_blank(text) : text == std::string_view(options.separator)));
      if (!boundary) {
        if (ended && !too_long) batch->text.push_back('\n');
        continue;
      }
      batch->text.resize(line_start);
      if (too_long) {
        emit_too_long(start, at_line, 1);
        return true;
      }
      // The line break before the boundary belongs to the boundary.
      if (batch->text.size() > start && batch->text.back() == '\n') batch->text.pop_back();
      if (batch->text.size() > start && batch->text.back() == '\r') batch->text.pop_back();
      if (!all_blank(std::string_view(batch->text).substr(start))) {
        emit(start, at_line, 1);
        return true;
      }
      batch->text.resize(start);
      if (!any) return false;
      at_line = line;
    }
  }

  bool next_record() {
    return !json ? next_text() : array == Array::none ? next_json_line() : next_element();
  }
};

RecordReader::RecordReader(std::vector<InputFile> files, RecordOptions options)
    : state_(std::make_unique<State>()) {
  state_->files = std::move(files);
  state_->options = std::move(options);
  for (const auto& input : state_->files) {
    std::error_code error;
    const auto size = fs::file_size(input.path, error);
    if (!error) state_->total_bytes += static_cast<int64_t>(size);
  }
}
RecordReader::~RecordReader() = default;

bool RecordReader::next(RecordBatch& batch, int64_t target_bytes) {
  State& state = *state_;
  batch.text.clear();
  batch.records.clear();
  state.batch = &batch;
  while (static_cast<int64_t>(batch.text.size()) < target_bytes || batch.records.empty()) {
    if (!state.reader) {
      if (state.file + 1 == static_cast<int32_t>(state.files.size())) break;
      state.open(state.file + 1);
    }
    if (!state.next_record()) {
      state.done_bytes += state.reader->file_size();
      state.reader.reset();
    }
  }
  batch.text.append(kPadding, '\0');
  batch.file_bytes = state.done_bytes + (state.reader ? state.reader->file_bytes_read() : 0);
  return !batch.records.empty();
}

bool RecordReader::at_end() const {
  return !state_->reader && state_->file + 1 == static_cast<int32_t>(state_->files.size());
}
const std::vector<InputFile>& RecordReader::files() const {
  return state_->files;
}
const HtmlPages& RecordReader::html_pages() const {
  return state_->html_pages;
}
int64_t RecordReader::file_bytes_total() const {
  return state_->total_bytes;
}

}  // namespace capstan::data
