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
  std::string configuration;  // its hash; of a group, empty
  // Of the table's keys, in their order; empty text where the trial does not set it.
  Values values;
  std::vector<size_t> trials;       // indices into the plan
  std::array<int64_t, 6> states{};  // how many trials are in each State
  // Ranked: a trial of it is done with a finite metric; then the numbers are of those trials, else of all
  // that have them.
  bool ranked = false;
  SeedStatistics metric;
  std::optional<double> best;  // of the metric's goal
  std::optional<size_t> best_trial;
  SeedStatistics steps, tokens_per_second, memory_bytes, seconds;
  std::string reason;  // of failed, pruned and lost trials, each reason once
  int64_t count(State state) const { return states[static_cast<size_t>(state)]; }
};
// "done", or "2 done, 1 failed"
std::string states_text(const TableRow& row);

struct Table {
  std::vector<std::string> keys;   // paths that vary, or those grouped by
  std::vector<std::string> names;  // short forms of them
  Metric metric;
  bool grouped = false, seeds = false;  // seeds: some row has more than one trial
  std::vector<size_t> invalid;          // of the plan's invalid trials those that meet the conditions
  // Ranked ones first, the best on top; then running, pending, pruned, failed.
  std::vector<TableRow> rows;
  size_t ranked = 0;
  size_t hidden = 0;  // rows that --top left out
};

struct TableOptions {
  std::optional<int64_t> top;
  std::vector<std::string> where;     // conditions as for parse_where
  std::vector<std::string> group_by;  // paths or short names of them
};
// Throws ErrorCode::usage for an unknown name or a bad condition.
Table make_table(const Results& results, const TableOptions& options = {});

// The mean with the digits that its deviation justifies: "2.314 ± 0.012"; one number has no deviation.
std::string metric_text(const SeedStatistics& metric);

// The cells of a table for display, headings first, numbers rounded, of the ranked rows or of the others.
enum class RowSelection : uint8_t { ranked, others };
std::vector<std::vector<std::string>> cells(const Table& table, const Results& results, RowSelection part);

std::string table_csv(const Table& table, const Results& results);       // all digits; RFC 4180, with \n
std::string table_json(const Table& table, const Results& results);      // one object
std::string table_markdown(const Table& table, const Results& results);  // both parts

}  // namespace capstan::sweep
