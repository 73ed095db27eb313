#include "planner/published_rows.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/file.hpp"
#include "base/text.hpp"
#include "support/paths.hpp"

namespace capstan::planner::test {

namespace {

std::vector<std::string> cells_of(std::string_view line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      cells.emplace_back();
    else
      cells.back() += c;
  }
  return cells;
}

}  // namespace

double PublishedRow::number(const std::string& column) const {
  const auto value = parse_double(text(column));
  REQUIRE_MESSAGE(value.has_value(), column, " of ", name());
  return *value;
}

int64_t PublishedRow::size(const std::string& column) const {
  return has(column) ? static_cast<int64_t>(number(column)) : 1;
}

std::vector<double> PublishedRow::noted(const std::string& label) const {
  const std::string& notes = text("notes");
  const size_t at = notes.find(label);
  REQUIRE_MESSAGE(at != std::string::npos, label, " in ", name());
  size_t end = at + label.size();
  const auto belongs = [](char c) {
    return std::isdigit(static_cast<unsigned char>(c)) || c == '.' || c == '/';
  };
  while (end < notes.size() && belongs(notes[end])) ++end;
  std::vector<double> values;
  for (const auto part :
       split(std::string_view(notes).substr(at + label.size(), end - at - label.size()), '/'))
    values.push_back(parse_double(part).value());
  return values;
}

double PublishedRow::tokens_per_second() const {
  if (has("tokens_per_s_per_gpu") && !has("iter_time_s")) return number("tokens_per_s_per_gpu");
  return number("gbs") * number("seq") / number("iter_time_s") / number("ngpu");
}

std::vector<PublishedRow> published_rows(const std::string& file) {
  const std::string text = read_file(std::string(capstan::test::kSourceDirectory) + "/tests/planner/" + file);
  std::vector<PublishedRow> rows;
  std::vector<std::string> heads;
  for (const auto line : split(text, '\n')) {
    if (line.empty()) continue;
    const std::vector<std::string> cells = cells_of(line);
    if (heads.empty()) {
      heads = cells;
      continue;
    }
    REQUIRE(cells.size() == heads.size());
    std::map<std::string, std::string> row;
    for (size_t i = 0; i < heads.size(); ++i) row[heads[i]] = cells[i];
    rows.emplace_back(std::move(row));
  }
  return rows;
}

RunShape shape_of(const PublishedRow& row, bool gated) {
  RunShape s;
  s.layers = row.size("layers"), s.hidden = row.size("hidden");
  s.heads = row.size("heads"), s.kv_groups = row.has("kv_groups") ? row.size("kv_groups") : s.heads;
  // Some rows do not name the heads; their width is the hidden size.
  if (!row.has("heads")) s.heads = s.kv_groups = s.hidden / 128;
  s.head_dim = s.hidden / s.heads;
  // Heads that do not divide the hidden size: attention has its width.
  if (s.head_dim * s.heads != s.hidden) s.heads = s.kv_groups = 1, s.head_dim = s.hidden;
  s.ffn = row.size("ffn"), s.vocab = row.size("vocab"), s.seq = row.size("seq");
  s.gated = gated, s.tied = !gated;
  s.positions = gated ? 0 : s.seq;
  s.norm_vectors = gated ? 1 : 2;
  s.qkv_bias = s.output_bias = s.mlp_bias = !gated;
  s.tp = row.size("tp"), s.pp = row.size("pp"), s.vpp = row.size("vpp"), s.cp = row.size("cp");
  s.dp = row.has("dp") ? row.size("dp") : row.size("ngpu") / (s.tp * s.pp * s.cp);
  s.etp = s.tp;
  // Megatron's default, in distributed_data_parallel_config.
  s.bucket_elements = std::max<int64_t>(40'000'000, 1'000'000 * s.dp * s.cp);
  s.micro_batch = row.size("mbs"), s.global_batch = row.size("gbs");
  s.sequence_parallel = s.tp > 1;
  s.schedule = s.vpp > 1 ? config::PipelineSchedule::interleaved : config::PipelineSchedule::one_f_one_b;
  s.group = s.pp;
  s.recompute.full = row.text("recompute").starts_with("full");
  split_evenly(s);
  return s;
}

double mean_after_one(const std::map<std::string, std::vector<double>>& ratios, const std::string& name) {
  double sum = 0, worst = 0;
  size_t predicted = 0;
  for (const auto& [key, of_key] : ratios) {
    if (of_key.size() < 2) continue;
    double errors = 0;
    for (size_t i = 0; i < of_key.size(); ++i)
      for (size_t k = 0; k < of_key.size(); ++k) {
        const double error = std::abs(of_key[k] / of_key[i] - 1);
        errors += error, worst = std::max(worst, error);
      }
    const auto choices = static_cast<double>(of_key.size());
    MESSAGE(key, ": ", of_key.size(), " rows, mean after one of them ",
            100 * errors / (choices * (choices - 1)), " %");
    sum += errors / choices, predicted += of_key.size() - 1;
  }
  const double mean = sum / static_cast<double>(predicted);
  MESSAGE(name, " after one row of each: ", predicted, " rows, mean ", 100 * mean, " %, largest ",
          100 * worst, " %");
  return mean;
}

}  // namespace capstan::planner::test
