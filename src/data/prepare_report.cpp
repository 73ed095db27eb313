#include "data/prepare_report.hpp"

#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"

namespace capstan::data {

namespace {

std::string percent(int64_t part, int64_t total) {
  return total > 0 ? std::to_string(
                         static_cast<int>(100.0 * static_cast<double>(part) / static_cast<double>(total))) +
                         " %"
                   : "";
}

std::string rate(double bytes_per_second) {
  return fixed(bytes_per_second / 1e6, 1) + " MB/s";
}

}  // namespace

std::string to_text(const PrepareProgress& now) {
  std::string line =
      rate(now.text_bytes_per_second) + "  " + human_count(static_cast<double>(now.documents)) + " " +
      plural(now.documents, "document") + "  " + human_count(static_cast<double>(now.tokens)) + " tokens";
  if (now.skipped > 0) line += "  " + with_separators(now.skipped) + " skipped";
  return line + "  " + percent(now.file_bytes, now.file_bytes_total) + "  " +
         human_duration(now.seconds_left) + " left";
}

std::string to_text(const PrepareResult& result) {
  std::string out;
  int64_t text_bytes = 0;
  for (const auto& key : result.keys) {
    text_bytes += key.text_bytes;
    out += key.prefix + ".bin/.idx: " + with_separators(key.documents) + " " +
           plural(key.documents, "document") + ", " + with_separators(key.tokens) + " tokens (" +
           std::string(name_of(result.type)) + ")";
    if (key.empty_documents > 0) out += ", " + with_separators(key.empty_documents) + " empty";
    if (key.tokens > 0)
      out += ", " + fixed(static_cast<double>(key.text_bytes) / static_cast<double>(key.tokens), 2) +
             " bytes/token";
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
  OrderedJson json;
  json["datasets"] = OrderedJson::array();
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
  return dump_json(json);
}

}  // namespace capstan::data
