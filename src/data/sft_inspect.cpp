#include "data/sft_inspect.hpp"

#include <algorithm>

#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"

namespace capstan::data {

namespace {

bool is_loss_token(uint32_t token) {
  return (token & SftSamples::kLossToken) != 0;
}

SftReport::Document document_of(const SftDataset& dataset, const text::Tokenizer& tokenizer, int64_t sample,
                                int64_t begin, int64_t& tokens_left) {
  const auto all = dataset.tokens(sample);
  SftReport::Document document;
  document.location = dataset.location(sample);
  document.begin = begin;
  document.tokens = static_cast<int64_t>(all.size());
  // The first token is never predicted.
  document.loss_tokens = std::count_if(all.begin() + 1, all.end(), is_loss_token);
  const auto shown = static_cast<size_t>(std::min<int64_t>(tokens_left, document.tokens));
  tokens_left -= static_cast<int64_t>(shown);
  for (size_t i = 0; i < shown; ++i) {
    document.ids.push_back(static_cast<int32_t>(all[i] & ~SftSamples::kLossToken));
    document.loss.push_back(i > 0 && is_loss_token(all[i]));
  }
  for (size_t i = 0; i < shown;) {
    size_t end = i + 1;
    while (end < shown && document.loss[end] == document.loss[i]) ++end;
    document.segments.push_back(
        {tokenizer.decode(std::span(document.ids).subspan(i, end - i)), document.loss[i]});
    i = end;
  }
  return document;
}

}  // namespace

SftReport inspect_sft(const SftDataset& dataset, const text::Tokenizer& tokenizer, int64_t count,
                      int64_t tokens) {
  SftReport report;
  report.summary = dataset.summary();
  report.counts = dataset.counts();
  report.rows = dataset.epoch_samples();
  report.row_length = dataset.sequence_length();
  const int64_t shown = std::min(count, report.rows);
  int64_t printed = 0;
  for (int64_t i = 0; i < shown; ++i) {
    SftReport::Row row;
    row.number = report.rows * i / shown;
    for (const int64_t sample : dataset.samples_of(row.number)) {
      // Shows the tokens of `count` documents in all, distributed evenly over the rows.
      int64_t left = printed * shown < count * (i + 1) ? tokens : 0;
      if (left > 0) ++printed;
      row.documents.push_back(document_of(dataset, tokenizer, sample, row.filled, left));
      row.filled += row.documents.back().tokens - 1;
    }
    report.shown.push_back(std::move(row));
  }
  return report;
}

std::string to_text_report(const SftReport& report, bool color) {
  const char *on = color ? "\x1b[32m" : "⟦", *off = color ? "\x1b[0m" : "⟧", *rule = color ? "\x1b[2m" : "",
             *end_rule = color ? "\x1b[0m" : "";
  std::string out = report.summary + "\n";
  for (const std::string& bad : report.counts.reports) out += "skipped: " + escape_controls(bad) + "\n";
  for (const std::string& location : report.counts.without_loss_locations)
    out += "no loss tokens, left out: " + escape_controls(location) + "\n";
  for (const std::string& location : report.counts.empty_locations)
    out += "empty answer: " + escape_controls(location) + "\n";
  if (!report.counts.turn_end_problem.empty())
    out += "warning: " + escape_controls(report.counts.turn_end_problem) + "\n";
  for (const auto& row : report.shown) {
    int64_t loss_tokens = 0;
    for (const auto& document : row.documents) loss_tokens += document.loss_tokens;
    out += "\nrow " + std::to_string(row.number) + ": " + std::to_string(row.documents.size()) +
           (row.documents.size() == 1 ? " document, " : " documents, ") + with_separators(row.filled) +
           " of " + with_separators(report.row_length) + " positions, " + with_separators(loss_tokens) +
           " loss tokens\n";
    size_t left_out = 0;
    for (const auto& document : row.documents) {
      if (document.ids.empty()) {
        ++left_out;
        continue;
      }
      out += std::string(rule) + "--- at " + std::to_string(document.begin) + ": " +
             escape_controls(document.location) + ", " + with_separators(document.tokens) + " tokens, " +
             with_separators(document.loss_tokens) + " loss tokens" + end_rule + "\n";
      for (const auto& segment : document.segments)
        out += segment.in_loss ? on + escape_controls(segment.text) + off : escape_controls(segment.text);
      if (static_cast<int64_t>(document.ids.size()) < document.tokens)
        out += std::string(rule) + " …" + end_rule;
      if (!out.ends_with('\n')) out += '\n';
    }
    if (left_out > 0)
      out += std::string(rule) + "--- and " + counted(left_out, "more document") + end_rule + "\n";
  }
  return out;
}

std::string to_json_report(const SftReport& report) {
  OrderedJson json;
  const SftCounts& counts = report.counts;
  json["schema"] = "capstan.sft/1";
  json["records"] = counts.records;
  json["samples"] = counts.samples;
  json["tokens"] = counts.tokens;
  json["loss_tokens"] = counts.loss_tokens;
  json["truncated"] = counts.truncated;
  json["dropped"] = counts.dropped;
  json["without_loss"] = counts.without_loss;
  json["bad"] = counts.bad;
  json["reports"] = counts.reports;
  json["without_loss_locations"] = counts.without_loss_locations;
  json["empty_answers"] = counts.empty_answers;
  json["empty_locations"] = counts.empty_locations;
  json["turn_end_problem"] = counts.turn_end_problem;
  json["rows"] = report.rows;
  json["row_length"] = report.row_length;
  json["shown"] = OrderedJson::array();
  for (const auto& row : report.shown) {
    OrderedJson one{{"row", row.number}, {"filled", row.filled}, {"documents", OrderedJson::array()}};
    for (const auto& document : row.documents) {
      std::vector<int> loss(document.loss.begin(), document.loss.end());
      std::string text;
      for (const auto& segment : document.segments) text += segment.text;
      one["documents"].push_back({{"location", document.location},
                                  {"begin", document.begin},
                                  {"tokens", document.tokens},
                                  {"loss_tokens", document.loss_tokens},
                                  {"ids", document.ids},
                                  {"loss", loss},
                                  {"text", text}});
    }
    json["shown"].push_back(std::move(one));
  }
  return dump_json(json);
}

}  // namespace capstan::data
