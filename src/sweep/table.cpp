#include "sweep/table.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "sweep/json.hpp"
#include "sweep/values.hpp"

namespace capstan::sweep {

namespace {

constexpr std::array kShownStates{State::pending, State::running, State::done,
                                  State::failed,  State::pruned,  State::lost};

// State of invalid trials.
constexpr const char* kInvalid = "invalid";

// A name in a condition or a grouping: a path, or its short form.
std::optional<std::string> path_named(const std::string& name, const std::vector<std::string>& paths,
                                      const std::vector<std::string>& names) {
  for (size_t i = 0; i < paths.size(); ++i)
    if (paths[i] == name || names[i] == name) return paths[i];
  return std::nullopt;
}

[[noreturn]] void unknown_name(const std::string& what, const std::string& name,
                               const std::vector<std::string>& known) {
  fail(ErrorCode::usage, what + " has an unknown name: `" + name + "`",
       near_help(name, known, "known names: "));
}

// Names in conditions beside the keys. Those of a trial apply before seeds are aggregated.
constexpr std::array<std::string_view, 3> kOfTrial{"state", "seed", "trial"};
constexpr std::array<std::string_view, 6> kOfRow{"steps", "tokens_per_second", "memory_bytes", "seconds", "n",
                                                 "sd"};

struct Conditions {
  std::vector<Condition> of_trials, of_rows;
};

Condition parse_condition(std::string_view text) {
  const size_t at = std::min(text.find_first_of("<>=!"), text.size());
  const std::string_view rest = text.substr(at);
  auto compared = comparison_of(rest);
  if (!compared && rest.starts_with('=')) compared = {Condition::Kind::equal, trim(rest.substr(1))};
  const std::string path(trim(text.substr(0, at)));
  if (!compared || path.empty() || compared->value.empty())
    fail(ErrorCode::usage, "`" + std::string(trim(text)) + "` is not a condition",
         "write NAME=VALUE, NAME=A,B, or with != < <= > >=; several are joined by `&`: 'lr>=3e-4 & "
         "val/loss<3'");
  Condition condition{path, compared->kind, {}};
  if (!condition.is_bound())
    for (const std::string_view part : split(compared->value, ',')) condition.values.emplace_back(trim(part));
  else if (number_of(compared->value))
    condition.values = {std::string(compared->value)};
  else
    fail(ErrorCode::usage, "`" + std::string(sign_of(compared->kind)) + "` compares numbers, and `" +
                               std::string(compared->value) + "` is not a number");
  return condition;
}

Conditions parse_where(const std::vector<std::string>& texts, const Table& table) {
  Conditions conditions;
  for (const std::string& text : texts)
    for (const std::string_view part : split(text, '&')) {
      // `&&` leaves an empty part.
      if (trim(part).empty()) continue;
      Condition condition = parse_condition(part);
      const auto among = [&](const auto& names) {
        return std::find(names.begin(), names.end(), condition.path) != names.end();
      };
      const auto key = path_named(condition.path, table.keys, table.names);
      if (key) condition.path = *key;
      if (!key && condition.path == table.metric.name) condition.path = "metric";
      if (key || among(kOfTrial)) {
        conditions.of_trials.push_back(std::move(condition));
      } else if (condition.path == "metric" || among(kOfRow)) {
        conditions.of_rows.push_back(std::move(condition));
      } else {
        std::vector<std::string> known = table.names;
        known.push_back(table.metric.name);
        known.insert(known.end(), kOfTrial.begin(), kOfTrial.end());
        known.insert(known.end(), kOfRow.begin(), kOfRow.end());
        unknown_name("the condition", condition.path, known);
      }
    }
  return conditions;
}

// The values that conditions on a trial compare.
Values with_state(Values point, std::string_view state, std::optional<int64_t> seed) {
  point.emplace_back("state", state);
  if (seed) point.emplace_back("seed", std::to_string(*seed));
  return point;
}

bool row_meets(const std::vector<Condition>& conditions, const TableRow& row) {
  Values point{{"n", std::to_string(row.metric.n)}};
  const auto add = [&](const char* name, std::optional<double> value) {
    if (value && std::isfinite(*value)) point.emplace_back(name, to_text(*value));
  };
  add("metric", row.metric.mean);
  add("sd", row.metric.deviation);
  add("steps", row.steps.mean);
  add("tokens_per_second", row.tokens_per_second.mean);
  add("memory_bytes", row.memory_bytes.mean);
  add("seconds", row.seconds.mean);
  return holds(conditions, point);
}

void measure(TableRow& row, const Results& results) {
  for (const size_t i : row.trials) ++row.states[static_cast<size_t>(results.trials[i].status.state)];
  const auto counts = [&](size_t i) {
    const TrialStatus& status = results.trials[i].status;
    return status.state == State::done && status.metric && std::isfinite(*status.metric);
  };
  row.ranked = std::any_of(row.trials.begin(), row.trials.end(), counts);
  std::vector<double> metric, steps, rate, memory, seconds;
  std::vector<std::string> reasons;
  for (const size_t i : row.trials) {
    const TrialStatus& status = results.trials[i].status;
    const bool bad =
        status.state == State::failed || status.state == State::pruned || status.state == State::lost;
    if (bad && std::find(reasons.begin(), reasons.end(), status.reason) == reasons.end() &&
        !status.reason.empty())
      reasons.push_back(status.reason);
    if (row.ranked && !counts(i)) continue;
    if (status.metric && std::isfinite(*status.metric)) {
      metric.push_back(*status.metric);
      if (!row.best || results.metric().better(*status.metric, *row.best))
        row.best = status.metric, row.best_trial = i;
    }
    if (status.step) steps.push_back(static_cast<double>(*status.step));
    const RunMeasurements& measured = results.trials[i].measured;
    if (measured.tokens_per_second) rate.push_back(*measured.tokens_per_second);
    if (measured.memory_bytes) memory.push_back(*measured.memory_bytes);
    if (status.seconds > 0) seconds.push_back(status.seconds);
  }
  row.metric = seed_statistics(metric);
  row.steps = seed_statistics(steps);
  row.tokens_per_second = seed_statistics(rate);
  row.memory_bytes = seed_statistics(memory);
  row.seconds = seed_statistics(seconds);
  row.reason = join(reasons, "; ");
  if (!row.ranked && row.reason.empty() && row.count(State::done) > 0)
    row.reason = "no finite `" + results.metric().name + "`";
}

// The order of rows that are not ranked.
size_t unranked_order(const TableRow& row) {
  constexpr std::array order{State::running, State::pending, State::done,
                             State::pruned,  State::lost,    State::failed};
  size_t at = 0;
  while (at + 1 < order.size() && row.count(order[at]) == 0) ++at;
  return at;
}

}  // namespace

std::string metric_text(const SeedStatistics& metric) {
  if (metric.n == 0) return "-";
  if (!metric.deviation) return significant(metric.mean, 5);
  int decimals = 4;
  if (*metric.deviation > 0)
    decimals = std::clamp(1 - static_cast<int>(std::floor(std::log10(*metric.deviation))), 0, 9);
  // Large and tiny means read better with an exponent.
  const double size = std::abs(metric.mean);
  if (size >= 1e6 || (size > 0 && size < 1e-3))
    return significant(metric.mean, 5) + " ± " + significant(*metric.deviation, 2);
  return fixed(metric.mean, decimals) + " ± " + fixed(*metric.deviation, decimals);
}

std::string states_text(const TableRow& row) {
  std::vector<std::string> parts;
  const auto total = static_cast<int64_t>(row.trials.size());
  for (const State state : kShownStates) {
    const int64_t count = row.count(state);
    if (count == total) return std::string(name_of(state));
    if (count > 0) parts.push_back(std::to_string(count) + " " + std::string(name_of(state)));
  }
  return join(parts, ", ");
}

Table make_table(const Results& results, const TableOptions& options) {
  const Plan& plan = results.plan;
  Table table;
  table.metric = results.metric();
  table.keys = plan.varying;
  table.names = short_names(table.keys);
  const Conditions where = parse_where(options.where, table);
  if (!options.group_by.empty()) {
    std::vector<std::string> keys;
    for (const std::string& name : options.group_by) {
      const auto path = path_named(name, table.keys, table.names);
      if (!path) unknown_name("the grouping", name, table.names);
      if (std::find(keys.begin(), keys.end(), *path) == keys.end()) keys.push_back(*path);
    }
    table.keys = std::move(keys);
    table.names = short_names(table.keys);
    table.grouped = true;
  }

  // Keyed by configuration, or by the values of the grouping keys.
  std::map<std::string, size_t> row_of;
  for (size_t i = 0; i < plan.trials.size(); ++i) {
    const TrialPlan& trial = plan.trials[i];
    Values point = with_state(trial.values, name_of(results.trials[i].status.state), trial.seed);
    point.emplace_back("trial", trial.id);
    if (!holds(where.of_trials, point)) continue;
    Values values;
    for (const std::string& key : table.keys) values.emplace_back(key, value_of(trial.values, key));
    std::string name = trial.configuration;
    if (table.grouped) {
      name.clear();
      for (const auto& [key, value] : values) name += std::to_string(value.size()) + ":" + value;
    }
    const auto [at, fresh] = row_of.emplace(name, table.rows.size());
    if (fresh) {
      TableRow& row = table.rows.emplace_back();
      if (!table.grouped) row.configuration = trial.configuration;
      row.values = std::move(values);
    }
    table.rows[at->second].trials.push_back(i);
  }
  for (TableRow& row : table.rows) {
    measure(row, results);
    if (row.trials.size() > 1) table.seeds = true;
  }
  // Invalid trials have values and no results.
  for (size_t i = 0; i < plan.invalid.size() && where.of_rows.empty() && !table.grouped && !options.top; ++i)
    if (holds(where.of_trials, with_state(plan.invalid[i].values, kInvalid, plan.invalid[i].seed)))
      table.invalid.push_back(i);
  std::erase_if(table.rows, [&](const TableRow& row) { return !row_meets(where.of_rows, row); });
  std::stable_sort(table.rows.begin(), table.rows.end(), [&](const TableRow& a, const TableRow& b) {
    if (a.ranked != b.ranked) return a.ranked;
    if (a.ranked) return table.metric.better(a.metric.mean, b.metric.mean);
    return unranked_order(a) < unranked_order(b);
  });
  const auto is_ranked = [](const TableRow& row) { return row.ranked; };
  table.ranked = static_cast<size_t>(std::count_if(table.rows.begin(), table.rows.end(), is_ranked));
  if (options.top) {
    const size_t kept = std::min(table.ranked, static_cast<size_t>(*options.top));
    table.hidden = table.rows.size() - kept;
    table.rows.resize(kept);
    table.ranked = kept;
  }
  return table;
}

std::vector<std::vector<std::string>> cells(const Table& table, const Results& results,
                                            RowSelection selection) {
  const bool ranked = selection == RowSelection::ranked;
  std::vector<std::vector<std::string>> lines;
  std::vector<std::string> head;
  if (ranked) head.emplace_back("#");
  head.insert(head.end(), table.names.begin(), table.names.end());
  head.push_back(table.metric.name);
  if (table.seeds) head.emplace_back("n");
  if (table.grouped) head.emplace_back("best");
  for (const char* name : {"steps", "tokens/s", "memory", "time"}) head.emplace_back(name);
  // A row of several seeds shows its configuration.
  const bool replicated = table.seeds && !table.grouped;
  head.emplace_back(table.grouped ? "best trial" : replicated ? "configuration" : "trial");
  bool mixed = !ranked;
  for (size_t i = 0; i < table.ranked && !mixed; ++i) mixed = states_text(table.rows[i]) != "done";
  if (mixed) head.emplace_back("state");
  if (!ranked) head.emplace_back("reason");
  lines.push_back(std::move(head));
  for (size_t i = 0; i < table.rows.size(); ++i) {
    const TableRow& row = table.rows[i];
    if (row.ranked != ranked) continue;
    std::vector<std::string>& line = lines.emplace_back();
    if (ranked) line.push_back(std::to_string(i + 1));
    for (const auto& [key, value] : row.values) line.push_back(value.empty() ? "-" : value);
    line.push_back(metric_text(row.metric));
    if (table.seeds)
      line.push_back(std::to_string(ranked ? row.metric.n : static_cast<int64_t>(row.trials.size())));
    if (table.grouped) line.push_back(row.best ? significant(*row.best, 5) : "-");
    line.push_back(row.steps.n ? significant(row.steps.mean, 8) : "-");
    line.push_back(row.tokens_per_second.n ? human_count(row.tokens_per_second.mean) : "-");
    line.push_back(row.memory_bytes.n ? human_bytes(row.memory_bytes.mean) : "-");
    line.push_back(row.seconds.n ? human_duration(row.seconds.mean) : "-");
    line.push_back(replicated ? row.configuration
                              : results.plan.trials[row.best_trial.value_or(row.trials.front())].id);
    if (mixed) line.push_back(states_text(row));
    if (!ranked) line.push_back(row.reason.substr(0, row.reason.find('\n')));
  }
  return lines;
}

namespace {

std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string cell = "\"";
  for (const char c : text) cell += c == '"' ? std::string("\"\"") : std::string(1, c);
  return cell + "\"";
}

std::string exact(const SeedStatistics& statistics) {
  return statistics.n ? to_text(statistics.mean) : std::string();
}

std::vector<std::string> ids_of(const TableRow& row, const Results& results) {
  std::vector<std::string> ids;
  for (const size_t i : row.trials) ids.push_back(results.plan.trials[i].id);
  return ids;
}

}  // namespace

std::string table_csv(const Table& table, const Results& results) {
  std::string text;
  const auto line = [&](const std::vector<std::string>& items) {
    for (size_t i = 0; i < items.size(); ++i) text += (i ? "," : "") + csv_cell(items[i]);
    text += '\n';
  };
  std::vector<std::string> head = table.keys;
  head.insert(head.end(), {table.metric.name, table.metric.name + "_sd", "n", "best", "steps",
                           "tokens_per_second", "memory_bytes", "seconds", "state", "reason", "trials"});
  line(head);
  for (const TableRow& row : table.rows) {
    std::vector<std::string> items;
    for (const auto& [key, value] : row.values) items.push_back(value);
    items.push_back(exact(row.metric));
    items.push_back(row.metric.deviation ? to_text(*row.metric.deviation) : std::string());
    items.push_back(std::to_string(row.metric.n));
    items.push_back(row.best ? to_text(*row.best) : std::string());
    for (const SeedStatistics* statistics :
         {&row.steps, &row.tokens_per_second, &row.memory_bytes, &row.seconds})
      items.push_back(exact(*statistics));
    items.push_back(states_text(row));
    items.push_back(row.reason);
    items.push_back(join(ids_of(row, results), " "));
    line(items);
  }
  for (const size_t i : table.invalid) {
    const InvalidTrial& trial = results.plan.invalid[i];
    std::vector<std::string> items;
    for (const std::string& key : table.keys) items.push_back(value_of(trial.values, key));
    // An invalid trial has no metric and no measurements: these cells stay empty.
    items.resize(head.size() - 3);
    items.insert(items.end(), {kInvalid, join(trial.reasons, "; "), ""});
    line(items);
  }
  return text;
}

std::string table_json(const Table& table, const Results& results) {
  OrderedJson root{{"schema", kTableSchema},
                   {"name", results.plan.name},
                   {"metric", json_of(table.metric)},
                   {"keys", table.keys},
                   {"rows", OrderedJson::array()}};
  const auto number = [](const SeedStatistics& statistics) {
    return statistics.n ? OrderedJson(statistics.mean) : OrderedJson();
  };
  for (const TableRow& row : table.rows) {
    OrderedJson item;
    if (!table.grouped) item["configuration"] = row.configuration;
    item["values"] = json_of(row.values);
    item["ranked"] = row.ranked;
    item["metric"] = number(row.metric);
    item["sd"] = or_null(row.metric.deviation);
    item["n"] = row.metric.n;
    item["best"] = or_null(row.best);
    item["steps"] = number(row.steps);
    item["tokens_per_second"] = number(row.tokens_per_second);
    item["memory_bytes"] = number(row.memory_bytes);
    item["seconds"] = number(row.seconds);
    item["states"] = OrderedJson::object();
    for (const State state : kShownStates)
      if (row.count(state)) item["states"][std::string(name_of(state))] = row.count(state);
    item["reason"] = row.reason;
    item["trials"] = ids_of(row, results);
    root["rows"].push_back(std::move(item));
  }
  root["invalid"] = OrderedJson::array();
  for (const size_t i : table.invalid) {
    const InvalidTrial& trial = results.plan.invalid[i];
    root["invalid"].push_back(
        {{"values", json_of(trial.values)}, {"seed", or_null(trial.seed)}, {"reasons", trial.reasons}});
  }
  root["hidden"] = table.hidden;
  return dump_json(root, 2) + "\n";
}

std::string table_markdown(const Table& table, const Results& results) {
  std::string text;
  for (const RowSelection selection : {RowSelection::ranked, RowSelection::others}) {
    const auto lines = cells(table, results, selection);
    if (lines.size() < 2) continue;
    if (!text.empty()) text += '\n';
    for (size_t i = 0; i < lines.size(); ++i) {
      for (const std::string& cell : lines[i]) text += "| " + markdown_cell(cell) + " ";
      text += "|\n";
      if (i > 0) continue;
      for (size_t k = 0; k < lines[i].size(); ++k) text += "|---";
      text += "|\n";
    }
  }
  return text;
}

}  // namespace capstan::sweep
