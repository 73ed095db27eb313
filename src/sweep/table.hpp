// The results of a sweep as rows: one for each distinct configuration, its seeds aggregated.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sweep/results.hpp"

namespace capstan::sweep {

inline constexpr std::string_view kTableSchema = "capstan.sweep-table/1";

struct TableRow {
  // Hash of the configuration. Empty for a group.
  std::string configuration;
  // Values of the table's keys, in their order. A value is empty if the trial does not set it.
  Values values;
  // Indices of the trials in the plan.
  std::vector<size_t> trials;
  // Number of trials in each State.
  std::array<int64_t, 6> states{};
  // True if a trial of the row is done and has a finite metric: statistics then cover only such trials,
  // otherwise all trials with numbers.
  bool ranked = false;
  SeedStatistics metric;
  // Best value according to the goal of the metric.
  std::optional<double> best;
  std::optional<size_t> best_trial;
  SeedStatistics steps, tokens_per_second, memory_bytes, seconds;
  // Reasons of failed, pruned and lost trials, each once.
  std::string reason;
  int64_t count(State state) const { return states[static_cast<size_t>(state)]; }
};
// "done", or "2 done, 1 failed"
std::string states_text(const TableRow& row);

struct Table {
  // Paths that vary, or the paths by which rows are grouped.
  std::vector<std::string> keys;
  // Short forms of the keys.
  std::vector<std::string> names;
  Metric metric;
  // grouped: the rows are groups. seeds: some row has more than one trial.
  bool grouped = false, seeds = false;
  // The plan's invalid trials that meet the conditions.
  std::vector<size_t> invalid;
  // The ranked rows, best first; then running, pending, pruned and failed rows.
  std::vector<TableRow> rows;
  size_t ranked = 0;
  // Number of rows omitted because of TableOptions::top.
  size_t hidden = 0;
};

struct TableOptions {
  std::optional<int64_t> top;
  // Conditions as for parse_where.
  std::vector<std::string> where;
  // Paths, or their short names.
  std::vector<std::string> group_by;
};
// Throws ErrorCode::usage for an unknown name or a bad condition.
Table make_table(const Results& results, const TableOptions& options = {});

// Formats the mean with the digits that its deviation justifies, as in "2.314 ± 0.012". A single number has
// no deviation.
std::string metric_text(const SeedStatistics& metric);

// The cells of a table for display, headings first, with rounded numbers. `selection`: the ranked rows or the
// others.
enum class RowSelection : uint8_t { ranked, others };
std::vector<std::vector<std::string>> cells(const Table& table, const Results& results,
                                            RowSelection selection);

// CSV as of RFC 4180, with \n as line end; numbers have all digits.
std::string table_csv(const Table& table, const Results& results);
// One JSON object.
std::string table_json(const Table& table, const Results& results);
// The ranked and the other rows as two Markdown tables.
std::string table_markdown(const Table& table, const Results& results);

}  // namespace capstan::sweep
