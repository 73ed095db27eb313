#include "data/verbs.hpp"

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

namespace {

template <class T, size_t N>
T one_of(const char* flag, const std::string& word, const std::pair<const char*, T> (&choices)[N]) {
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) {
    if (word == name) return value;
    names.push_back(name);
  }
  fail(ErrorCode::usage, std::string(flag) + " `" + word + "` is not one of " + join(names, ", "));
}

int32_t eod_of(const Tokenizer& tokenizer, const PrepareCommand& verb) {
  if (verb.eod) {
    if (const auto id = tokenizer.id_of(*verb.eod)) return *id;
    fail(ErrorCode::usage, "the tokenizer `" + verb.tokenizer + "` has no token `" + *verb.eod + "`");
  }
  if (const auto id = tokenizer.eod()) return *id;
  fail(ErrorCode::usage, "the tokenizer `" + verb.tokenizer + "` names no end-of-document token",
       "name one with --eod TOKEN, or leave --append-eod out");
}

std::string percent(int64_t part, int64_t whole) {
  return whole > 0 ? std::to_string(
                         static_cast<int>(100.0 * static_cast<double>(part) / static_cast<double>(whole))) +
                         " %"
                   : "";
}

std::string rate(double bytes_per_second) {
  char text[48];
  std::snprintf(text, sizeof text, "%.1f MB/s", bytes_per_second / 1e6);
  return text;
}

}  // namespace

PrepareResult run_prepare(const PrepareCommand& verb) {
  PrepareOptions options;
  options.inputs = verb.inputs;
  options.output_prefix = verb.output;
  options.json_keys = verb.json_keys;
  options.records.format = one_of<InputFormat>("--format", verb.format,
                                               {{"auto", InputFormat::automatic},
                                                {"json", InputFormat::json},
                                                {"jsonl", InputFormat::json},
                                                {"text", InputFormat::text}});
  options.records.split = one_of<TextSplit>("--documents", verb.documents,
                                            {{"auto", TextSplit::automatic},
                                             {"blank-line", TextSplit::blank_line},
                                             {"separator", TextSplit::separator},
                                             {"file", TextSplit::file}});
  if (verb.separator) {
    if (options.records.split != TextSplit::automatic && options.records.split != TextSplit::separator)
      fail(ErrorCode::usage, "--separator and --documents " + verb.documents + " exclude each other");
    if (verb.separator->find('\n') != std::string::npos || trim(*verb.separator).empty())
      fail(ErrorCode::usage, "the separator must be one line that is not blank");
    options.records.split = TextSplit::separator;
    options.records.separator = *verb.separator;
  }
  options.on_bad_line = one_of<OnBadLine>("--on-bad-line", verb.on_bad_line,
                                          {{"fail", OnBadLine::fail}, {"skip", OnBadLine::skip}});
  if (verb.workers < 0) fail(ErrorCode::usage, "--workers " + std::to_string(verb.workers) + " is negative");
  if (verb.eod && !verb.append_eod) fail(ErrorCode::usage, "--eod has no effect without --append-eod");

  const auto tokenizer = verb.loaded ? verb.loaded : Tokenizer::load(verb.tokenizer);
  options.tokenizer = record_of(*tokenizer, verb.tokenizer);
  options.overwrite = verb.overwrite;
  options.append_eod = verb.append_eod;
  if (verb.append_eod) options.eod = eod_of(*tokenizer, verb);
  options.vocab_size = tokenizer->vocab_size();
  options.progress = verb.progress;
  ThreadPool pool(verb.workers);
  return prepare(
      options, [&](std::string_view text, std::vector<int32_t>& ids) { tokenizer->encode(text, ids); }, pool);
}

std::string to_text(const PrepareProgress& now) {
  std::string line = rate(now.text_bytes_per_second) + "  " +
                     human_count(static_cast<double>(now.documents)) + " documents  " +
                     human_count(static_cast<double>(now.tokens)) + " tokens";
  if (now.skipped > 0) line += "  " + with_separators(now.skipped) + " skipped";
  return line + "  " + percent(now.file_bytes, now.file_bytes_total) + "  " +
         human_duration(now.seconds_left) + " left";
}

std::string to_text(const PrepareResult& result) {
  std::string out;
  int64_t text_bytes = 0;
  for (const auto& key : result.keys) {
    text_bytes += key.text_bytes;
    out += key.prefix + ".bin/.idx: " + with_separators(key.documents) + " documents, " +
           with_separators(key.tokens) + " tokens (" + std::string(name_of(result.type)) + ")";
    if (key.empty_documents > 0) out += ", " + with_separators(key.empty_documents) + " empty";
    if (key.tokens > 0) {
      char text[48];
      std::snprintf(text, sizeof text, ", %.2f bytes/token",
                    static_cast<double>(key.text_bytes) / static_cast<double>(key.tokens));
      out += text;
    }
    out += "\n";
  }
  if (result.skipped > 0) {
    out += with_separators(result.skipped) + " of " + with_separators(result.records) + " records skipped:\n";
    for (const auto& report : result.reports) out += "  " + report + "\n";
    if (result.skipped > static_cast<int64_t>(result.reports.size())) out += "  ...\n";
  }
  out += human_bytes(static_cast<double>(text_bytes)) + " of text from " + with_separators(result.files) +
         (result.files == 1 ? " file in " : " files in ") + human_duration(result.seconds) + " (" +
         rate(static_cast<double>(text_bytes) / std::max(result.seconds, 1e-9)) + ")\n";
  out += "look at it with: capstan data inspect " + result.keys.front().prefix + "\n";
  return out;
}

std::string to_json(const PrepareResult& result) {
  nlohmann::ordered_json json;
  json["datasets"] = nlohmann::ordered_json::array();
  for (const auto& key : result.keys)
    json["datasets"].push_back({{"key", key.key},
                                {"prefix", key.prefix},
                                {"documents", key.documents},
                                {"empty_documents", key.empty_documents},
                                {"sequences", key.sequences},
                                {"tokens", key.tokens},
                                {"text_bytes", key.text_bytes}});
  json["token_type"] = name_of(result.type);
  json["files"] = result.files;
  json["file_bytes"] = result.file_bytes;
  json["records"] = result.records;
  json["skipped"] = result.skipped;
  json["reports"] = result.reports;
  json["seconds"] = result.seconds;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

DatasetReport run_inspect(const InspectCommand& verb) {
  InspectOptions options;
  options.samples = verb.samples;
  options.sample_tokens = verb.sample_tokens;
  options.scan_tokens = verb.scan_tokens;
  std::shared_ptr<const Tokenizer> tokenizer;
  if (verb.tokenizer) {
    tokenizer = verb.loaded ? verb.loaded : Tokenizer::load(*verb.tokenizer);
    options.tokenizer = tokenizer.get();
    options.tokenizer_name = *verb.tokenizer;
    options.decode = [&](std::span<const int32_t> ids) { return tokenizer->decode(ids); };
  }
  // `data prepare --output PREFIX` writes PREFIX_text_document: that prefix names it too.
  const auto exists = [](const std::string& prefix) {
    std::error_code ignored;
    return std::filesystem::exists(prefix + ".idx", ignored) || std::filesystem::exists(prefix, ignored);
  };
  const std::string text = verb.prefix + "_text_document";
  return inspect(!exists(verb.prefix) && exists(text) ? text : verb.prefix, options);
}

}  // namespace capstan::data
