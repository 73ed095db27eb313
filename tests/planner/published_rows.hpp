// Rows of published measurements, in files with the columns of a common table: sizes of the model, layout,
// and what was measured. An empty cell is unknown.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "planner/run_shape.hpp"

namespace capstan::planner::test {

class PublishedRow {
 public:
  explicit PublishedRow(std::map<std::string, std::string> cells) : cells_(std::move(cells)) {}
  const std::string& text(const std::string& column) const { return cells_.at(column); }
  bool has(const std::string& column) const { return !text(column).empty(); }
  double number(const std::string& column) const;
  // 1 where the cell is empty.
  int64_t size(const std::string& column) const;
  // A number in the notes, after `label`: "bubble rate (computed from profile) " or "TF/TB/TW/Tcomm = ".
  std::vector<double> noted(const std::string& label) const;
  // "GPT 1.5B (1F1B), Zero Bubble …", for messages.
  std::string name() const { return text("model") + ", " + text("source"); }
  // Tokens per second of one GPU: printed, or from the time of a step.
  double tokens_per_second() const;

 private:
  std::map<std::string, std::string> cells_;
};

// The rows of tests/planner/FILE. Cells in quotes may contain commas.
std::vector<PublishedRow> published_rows(const std::string& file);

// Model and layout of a row. A plain GPT has biases, LayerNorm, learned positions and a tied output layer; a
// gated model has none of them.
RunShape shape_of(const PublishedRow& row, bool gated);

// Predicted by measured time of rows, by a key such as GPU and format. The mean error of the other rows of
// a key after one of them has set its factor: the mean over every choice of that one, so that no choice can
// flatter. Prints it for each key, after `name`.
double mean_after_one(const std::map<std::string, std::vector<double>>& ratios, const std::string& name);

}  // namespace capstan::planner::test
