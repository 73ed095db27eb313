#include "data/inspect.hpp"

#include <algorithm>
#include <bit>
#include <filesystem>

#include "base/json.hpp"
#include "base/text.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

namespace {

std::string pad(std::string text, size_t width) {
  if (text.size() < width) text.insert(0, width - text.size(), ' ');
  return text;
}

// Range of lengths of histogram bin i, inclusive.
std::pair<int64_t, int64_t> bounds(size_t bin) {
  if (bin == 0) return {0, 0};
  return {int64_t{1} << (bin - 1), (int64_t{1} << bin) - 1};
}

// Returns the prefix of a dataset that a user names by its prefix, by one of its files or by the output of
// `data prepare`.
std::string dataset_prefix(std::string name) {
  const auto exists = [](const std::string& path) {
    std::error_code ignored;
    return std::filesystem::exists(path, ignored);
  };
  const std::string text = name + "_text_document";
  if (!exists(name) && !exists(name + ".idx") && (exists(text) || exists(text + ".idx"))) return text;
  for (const std::string_view ending : {".bin", ".idx"})
    if (name.ends_with(ending)) name.resize(name.size() - ending.size());
  return name;
}

}  // namespace

DatasetReport inspect(const std::string& prefix, const InspectOptions& options) {
  const std::string name = dataset_prefix(prefix);
  std::error_code unknown;
  if (std::filesystem::is_regular_file(name, unknown) && !std::filesystem::exists(name + ".idx", unknown))
    fail(ErrorCode::failed,
         "`" + name + "` is a file, not the prefix of a dataset (PREFIX.bin and PREFIX.idx)",
         "text becomes a dataset by `capstan data prepare " + name + "`; fine-tuning data are FILE.jsonl");
  TokenizerCheck tokenizer(options.tokenizer, options.tokenizer_name, 0);
  const IndexedDataset dataset(name, tokenizer.token_limit());
  tokenizer.check(dataset);
  DatasetReport report;
  if (const auto meta = read_meta(dataset)) {
    report.tokenizer = meta->tokenizer;
    report.end_of_document = meta->end_of_document;
  }
  report.prefix = name;
  report.type = dataset.type();
  report.documents = dataset.documents();
  report.sequences = dataset.sequences();
  report.tokens = dataset.tokens();
  report.bin_bytes = dataset.bin_bytes();
  report.index_bytes = static_cast<int64_t>(std::filesystem::file_size(name + ".idx"));

  int64_t begin = 0;
  for (int64_t document = 0; document < dataset.documents(); ++document) {
    const int64_t end = dataset.document_begin(document + 1);
    int64_t tokens = 0;
    for (int64_t sequence = begin; sequence < end; ++sequence) tokens += dataset.length(sequence);
    begin = end;
    ++report.length_counts[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(tokens)))];
    if (tokens == 0) ++report.empty_documents;
    report.shortest = document == 0 ? tokens : std::min(report.shortest, tokens);
    report.longest = std::max(report.longest, tokens);
  }
  if (report.documents > 0)
    report.mean = static_cast<double>(report.tokens) / static_cast<double>(report.documents);

  if (options.scan_tokens) report.largest_token = dataset.largest_token(dataset.tokens());

  const int64_t shown = std::min(options.samples, report.documents);
  for (int64_t i = 0; i < shown; ++i) {
    const int64_t document = i * report.documents / shown;
    DatasetReport::Sample sample{document, 0, {}, {}};
    for (int64_t s = dataset.document_begin(document); s < dataset.document_begin(document + 1); ++s) {
      const int64_t tokens = dataset.length(s);
      sample.tokens += tokens;
      const auto left = options.sample_tokens - static_cast<int64_t>(sample.ids.size());
      const auto take = static_cast<size_t>(std::clamp<int64_t>(left, 0, tokens));
      sample.ids.resize(sample.ids.size() + take);
      dataset.read(s, 0, std::span(sample.ids).last(take));
    }
    if (options.tokenizer) sample.text = options.tokenizer->decode(sample.ids);
    report.samples.push_back(std::move(sample));
  }
  return report;
}

std::string to_text_report(const DatasetReport& report) {
  std::string out;
  const auto line = [&](std::string_view label, const std::string& value) {
    out += std::string(label) + std::string(std::max<size_t>(14, label.size() + 1) - label.size(), ' ') +
           value + "\n";
  };
  line("dataset", report.prefix);
  line("documents",
       with_separators(report.documents) +
           (report.empty_documents ? " (" + with_separators(report.empty_documents) + " empty)" : ""));
  if (report.sequences != report.documents) line("sequences", with_separators(report.sequences));
  line("tokens",
       with_separators(report.tokens) + " (" + human_count(static_cast<double>(report.tokens)) + ")");
  line("token type", std::string(name_of(report.type)));
  if (report.tokenizer) line("tokenizer", to_text(*report.tokenizer));
  if (report.end_of_document)
    line("document end", *report.end_of_document == DatasetMeta::kNone
                             ? "no token"
                             : "token " + with_separators(*report.end_of_document));
  if (report.largest_token >= 0) line("largest token", with_separators(report.largest_token));
  line("on disk", human_bytes(static_cast<double>(report.bin_bytes)) + " tokens + " +
                      human_bytes(static_cast<double>(report.index_bytes)) + " index");
  if (report.documents == 0) return out;
  line("tokens/document", fixed(report.mean, 1) + " on average, " + with_separators(report.shortest) +
                              " to " + with_separators(report.longest));

  constexpr int64_t kBarWidth = 40;
  const int64_t most = *std::max_element(report.length_counts.begin(), report.length_counts.end());
  size_t first = 0, last = report.length_counts.size();
  while (report.length_counts[first] == 0) ++first;
  while (report.length_counts[last - 1] == 0) --last;
  std::vector<std::string> ranges;
  size_t width = 0;
  for (size_t bin = first; bin < last; ++bin) {
    const auto [from, to] = bounds(bin);
    ranges.push_back(from == to ? with_separators(from)
                                : with_separators(from) + " - " + with_separators(to));
    width = std::max(width, ranges.back().size());
  }
  out += "\nlength in tokens, and how many documents have it\n";
  for (size_t bin = first; bin < last; ++bin) {
    const int64_t count = report.length_counts[bin];
    out += "  " + pad(ranges[bin - first], width) + "  " +
           pad(with_separators(count), with_separators(most).size());
    // Computes in double, because count · width may exceed 64 bits for a malformed index.
    const auto bar =
        static_cast<size_t>(static_cast<double>(count) / static_cast<double>(most) * kBarWidth + 0.5);
    if (count > 0) out += "  " + std::string(std::max<size_t>(bar, 1), '#');
    out += "\n";
  }
  for (const auto& sample : report.samples) {
    out += "\ndocument " + with_separators(sample.document) + " (" + with_separators(sample.tokens) +
           " tokens)\n ";
    for (const int32_t id : sample.ids) out += " " + std::to_string(id);
    if (sample.tokens > static_cast<int64_t>(sample.ids.size())) out += " ...";
    out += "\n";
    if (!sample.text.empty()) out += "  " + in_quotes(sample.text) + "\n";
  }
  return out;
}

std::string to_json_report(const DatasetReport& report) {
  OrderedJson json;
  json["schema"] = "capstan.dataset/1";
  json["prefix"] = report.prefix;
  json["documents"] = report.documents;
  json["empty_documents"] = report.empty_documents;
  json["sequences"] = report.sequences;
  json["tokens"] = report.tokens;
  json["token_type"] = name_of(report.type);
  if (report.tokenizer)
    json["tokenizer"] = {{"name", report.tokenizer->name},
                         {"vocab_size", report.tokenizer->vocab_size},
                         {"identity", report.tokenizer->identity}};
  if (report.end_of_document)
    json["end_of_document"] = *report.end_of_document == DatasetMeta::kNone
                                  ? OrderedJson(nullptr)
                                  : OrderedJson(*report.end_of_document);
  if (report.largest_token >= 0) json["largest_token"] = report.largest_token;
  json["bin_bytes"] = report.bin_bytes;
  json["index_bytes"] = report.index_bytes;
  json["shortest"] = report.shortest;
  json["longest"] = report.longest;
  json["mean"] = report.mean;
  json["lengths"] = OrderedJson::array();
  for (size_t bin = 0; bin < report.length_counts.size(); ++bin)
    if (report.length_counts[bin] > 0)
      json["lengths"].push_back({{"from", bounds(bin).first},
                                 {"to", bounds(bin).second},
                                 {"documents", report.length_counts[bin]}});
  json["samples"] = OrderedJson::array();
  for (const auto& sample : report.samples) {
    OrderedJson one{{"document", sample.document}, {"tokens", sample.tokens}, {"ids", sample.ids}};
    if (!sample.text.empty()) one["text"] = sample.text;
    json["samples"].push_back(std::move(one));
  }
  // Decoded text may end inside a character, so invalid UTF-8 is replaced.
  return dump_json(json);
}

}  // namespace capstan::data
