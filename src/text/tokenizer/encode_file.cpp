#include "text/tokenizer/encode_file.hpp"

#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"

namespace capstan::text {

namespace {

constexpr size_t kChunkBytes = 256 << 10;

struct Output {
  std::string text;
  FileTotals totals;
  // An error of the file, which is thrown after all output before it is written.
  std::string error;
};

// Splits the file after newlines, runs `convert` on the parts on all threads, and writes the results in
// order.
FileTotals convert_file(
    const std::filesystem::path& file, TextSink write, ThreadPool& pool, const FileProgress& progress,
    FunctionRef<void(std::string_view part, size_t offset, int worker, Output& out)> convert) {
  const MappedFile map(file);
  map.advise_sequential();
  const std::string_view text(reinterpret_cast<const char*>(map.bytes().data()), map.bytes().size());
  FileTotals totals;
  std::vector<std::string_view> parts;
  std::vector<Output> outputs;
  size_t position = 0;
  while (position < text.size()) {
    parts.clear();
    while (position < text.size() && parts.size() < static_cast<size_t>(pool.size()) * 4) {
      size_t end = text.size();
      if (text.size() - position > kChunkBytes) {
        const size_t newline = text.find('\n', position + kChunkBytes - 1);
        if (newline != std::string_view::npos) end = newline + 1;
      }
      parts.push_back(text.substr(position, end - position));
      position = end;
    }
    outputs.resize(std::max(outputs.size(), parts.size()));
    pool.parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t tile, int worker) {
      const auto i = static_cast<size_t>(tile);
      outputs[i].text.clear();
      outputs[i].totals = {};
      outputs[i].error.clear();
      convert(parts[i], static_cast<size_t>(parts[i].data() - text.data()), worker, outputs[i]);
    });
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!outputs[i].error.empty()) fail(ErrorCode::format, outputs[i].error);
      write(outputs[i].text);
      totals.lines += outputs[i].totals.lines;
      totals.bytes += outputs[i].totals.bytes;
      totals.tokens += outputs[i].totals.tokens;
    }
    if (progress) progress(static_cast<int64_t>(position), static_cast<int64_t>(text.size()));
  }
  return totals;
}

void append_number(std::string& out, int64_t value) {
  char digits[20];
  const auto [end, error] = std::to_chars(digits, digits + sizeof(digits), value);
  out.append(digits, end);
}

}  // namespace

FileTotals encode_file(const Tokenizer& tokenizer, const std::filesystem::path& file, TextSink write,
                       ThreadPool& pool, const FileProgress& progress, const EncodeOptions& options,
                       bool offsets) {
  return convert_file(file, write, pool, progress, [&](std::string_view part, size_t, int, Output& out) {
    std::vector<int32_t> ids;
    for (size_t begin = 0; begin < part.size();) {
      const size_t newline = part.find('\n', begin);
      const bool terminated = newline != std::string_view::npos;
      const std::string_view line = part.substr(begin, terminated ? newline - begin : std::string_view::npos);
      Encoding encoding;
      ids.clear();
      if (offsets) {
        encoding = tokenizer.encode_with_offsets(line, options);
        ids = encoding.ids;
      } else {
        tokenizer.encode(line, ids, options);
      }
      out.text += "{\"ids\":[";
      for (size_t i = 0; i < ids.size(); ++i) {
        if (i > 0) out.text += ',';
        append_number(out.text, ids[i]);
      }
      out.text += ']';
      if (offsets) out.text += ",\"offsets\":[";
      for (size_t i = 0; i < encoding.offsets.size(); ++i) {
        out.text += i > 0 ? ",[" : "[";
        append_number(out.text, static_cast<int64_t>(encoding.offsets[i].begin));
        out.text += ',';
        append_number(out.text, static_cast<int64_t>(encoding.offsets[i].end));
        out.text += ']';
      }
      if (offsets) out.text += ']';
      out.text += terminated ? "}\n" : ",\"newline\":false}\n";
      out.totals.lines += 1;
      out.totals.bytes += static_cast<int64_t>(line.size() + terminated);
      out.totals.tokens += static_cast<int64_t>(ids.size());
      begin += line.size() + terminated;
    }
  });
}

FileTotals decode_file(const Tokenizer& tokenizer, const std::filesystem::path& file, TextSink write,
                       ThreadPool& pool, const FileProgress& progress) {
  std::vector<std::unique_ptr<simdjson::dom::parser>> parsers(static_cast<size_t>(pool.size()));
  const auto parse = [&](std::string_view line, simdjson::dom::parser& parser, Output& out) -> std::string {
    simdjson::dom::element root;
    if (const auto error = parser.parse(line.data(), line.size(), true).get(root))
      return simdjson::error_message(error);
    simdjson::dom::array ids;
    if (root["ids"].get(ids)) return "expected an object with an array `ids`";
    std::vector<int32_t> line_ids;
    for (const auto value : ids) {
      int64_t id = 0;
      if (!value.is_int64() || value.get(id)) return "expected integers in `ids`";
      if (id < 0 || id >= tokenizer.vocab_size())
        return "the id " + std::to_string(id) + " is not in the vocabulary of " +
               std::to_string(tokenizer.vocab_size()) + " tokens";
      line_ids.push_back(static_cast<int32_t>(id));
    }
    out.text += tokenizer.decode_bytes(line_ids);
    out.totals.tokens += static_cast<int64_t>(line_ids.size());
    bool newline = true;
    if (const auto error = root["newline"].get(newline); error && error != simdjson::NO_SUCH_FIELD)
      return "expected a boolean `newline`";
    if (newline) out.text += '\n';
    return {};
  };
  return convert_file(
      file, write, pool, progress, [&](std::string_view part, size_t offset, int worker, Output& out) {
        auto& parser = parsers[static_cast<size_t>(worker)];
        if (!parser) {
          parser = std::make_unique<simdjson::dom::parser>();
          if (parser->allocate(0, 16)) throw std::bad_alloc();
        }
        for (size_t begin = 0; begin < part.size();) {
          const size_t newline = std::min(part.find('\n', begin), part.size());
          const std::string why = parse(part.substr(begin, newline - begin), *parser, out);
          if (!why.empty()) {
            const std::string_view before(part.data() - offset, offset + begin);
            out.error = file.string() + ":" +
                        std::to_string(1 + std::count(before.begin(), before.end(), '\n')) + ": " + why;
            return;
          }
          ++out.totals.lines;
          begin = newline + 1;
        }
        out.totals.bytes = static_cast<int64_t>(out.text.size());
      });
}

}  // namespace capstan::text
