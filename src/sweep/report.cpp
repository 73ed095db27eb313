#include "sweep/report.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/file.hpp"
#include "base/text.hpp"
#include "sweep/json.hpp"
#include "sweep/report_page.hpp"
#include "sweep/table.hpp"
#include "sweep/values.hpp"
#include "train/records/curve.hpp"
#include "train/records/page.hpp"

namespace capstan::sweep {

namespace {

constexpr size_t kPointsOfAll = 150'000, kMaxPoints = 300, kMinPoints = 12;
constexpr size_t kMaxRows = 1000;

OrderedJson finite_or_null(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? OrderedJson(*value) : OrderedJson();
}

std::vector<records::Point> points_of(const std::vector<CurvePoint>& curve) {
  std::vector<records::Point> points;
  for (const CurvePoint& point : curve) points.push_back({static_cast<double>(point.step), point.value});
  return points;
}

// Declared so, or numbers over more than one power of ten.
bool is_logarithmic(const Plan& plan, const std::string& path) {
  for (const Axis& axis : plan.definition.axes)
    if (axis.path == path && axis.kind != AxisKind::list) return axis.kind == AxisKind::log;
  double low = INFINITY, high = 0;
  for (const TrialPlan& trial : plan.trials) {
    const std::string value = value_of(trial.values, path);
    if (value.empty()) continue;
    const auto number = number_of(value);
    if (!number || !(*number > 0)) return false;
    low = std::min(low, *number), high = std::max(high, *number);
  }
  return high >= 10 * low;
}

// Numbers as JavaScript reads them: "4k" as 4000.
std::string plain_value(const std::string& value) {
  const auto number = number_of(value);
  return number ? to_text(*number) : value;
}

OrderedJson rows_text(const Table& table, const Results& results, RowSelection selection) {
  OrderedJson lines = OrderedJson::array();
  std::vector<std::vector<std::string>> texts = cells(table, results, selection);
  if (texts.size() < 2) return nullptr;
  lines.push_back({{"cells", std::move(texts[0])}});
  size_t next = 1;
  for (const TableRow& row : table.rows) {
    if (row.ranked != (selection == RowSelection::ranked)) continue;
    if (next > kMaxRows) break;
    lines.push_back({{"cells", std::move(texts[next++])}, {"trials", row.trials}});
  }
  return lines;
}

std::string data_text(const Results& results, const std::string& recipe, const std::string& shown) {
  const Plan& plan = results.plan;
  const Metric& metric = results.metric();
  const auto best = best_configuration(results);
  OrderedJson root;
  root["name"] = plan.name;
  root["subtitle"] = "base " + plan.definition.base + " · " +
                     std::string(config::enum_name(plan.definition.method)) + " · " +
                     (metric.goal == Metric::Goal::min ? "lowest " : "highest ") + metric.name + " (" +
                     metric.at + ")";
  root["metric"] = json_of(metric);
  root["keys"] = OrderedJson::array();
  const std::vector<std::string> names = short_names(plan.varying);
  for (size_t k = 0; k < names.size(); ++k)
    root["keys"].push_back(
        {{"path", plan.varying[k]}, {"name", names[k]}, {"log", is_logarithmic(plan, plan.varying[k])}});
  std::map<std::string, int64_t> states;
  double seconds = 0;
  for (const TrialResult& trial : results.trials) {
    ++states[std::string(name_of(trial.status.state))];
    seconds += trial.status.seconds;
  }
  root["states"] = states;
  root["seconds"] = seconds;
  if (best) {
    const TrialPlan& first = plan.trials[best->trials.front()];
    OrderedJson seeds = OrderedJson::array();
    for (const size_t i : best->trials)
      if (plan.trials[i].seed) seeds.push_back(*plan.trials[i].seed);
    root["best"] = {{"configuration", best->id},
                    {"trials", best->trials},
                    {"planned", best->planned},
                    {"seeds", seeds},
                    {"metric", finite_or_null(best->metric.mean)},
                    {"text", metric_text(best->metric)},
                    {"command", "capstan train " + shown + "/trials/" + first.id + "/recipe.yaml"},
                    {"recipe", recipe}};
  } else {
    root["best"] = nullptr;
  }
  root["importance"] = nullptr;
  if (const auto explained = explained_variance(results)) {
    OrderedJson axes = OrderedJson::array();
    for (const AxisImportance& axis : explained->axes) {
      std::vector<std::string> parts;
      for (const std::string& path : axis.paths)
        for (size_t k = 0; k < names.size(); ++k)
          if (plan.varying[k] == path) parts.push_back(names[k]);
      axes.push_back({{"name", join(parts, " + ")}, {"importance", axis.importance}});
    }
    root["importance"] = {{"axes", axes}, {"rest", explained->rest}, {"n", explained->n}};
  }
  const Table table = make_table(results);
  root["ranked"] = rows_text(table, results, RowSelection::ranked);
  root["others"] = rows_text(table, results, RowSelection::others);
  root["rows"] = table.rows.size();

  const size_t even = kPointsOfAll / std::max<size_t>(1, plan.trials.size());
  const size_t most = std::clamp(even, kMinPoints, kMaxPoints);
  std::string text = dump_json(root);
  // The closing brace: the trials follow.
  text.pop_back();
  text += ",\"trials\":[";
  for (size_t i = 0; i < plan.trials.size(); ++i) {
    const TrialPlan& trial = plan.trials[i];
    const TrialStatus& status = results.trials[i].status;
    OrderedJson item;
    item["id"] = trial.id;
    item["label"] = trial.label;
    item["seed"] = or_null(trial.seed);
    item["state"] = name_of(status.state);
    item["metric"] = finite_or_null(status.metric);
    item["step"] = or_null(status.step);
    item["reason"] = status.reason;
    std::vector<std::string> values;
    for (const std::string& path : plan.varying) values.push_back(plain_value(value_of(trial.values, path)));
    item["values"] = std::move(values);
    std::string line = dump_json(item);
    line.pop_back();
    text +=
        (i ? ",\n" : "\n") + line + "," + records::curve_json(points_of(results.trials[i].curve), most) + "}";
  }
  return text + "]}";
}

}  // namespace

std::optional<BestConfiguration> best_configuration(const Results& results) {
  const Table table = make_table(results);
  if (table.ranked == 0) return std::nullopt;
  const TableRow& row = table.rows.front();
  BestConfiguration best{row.configuration, {}, static_cast<int64_t>(row.trials.size()), row.metric};
  for (const size_t i : row.trials) {
    const TrialStatus& status = results.trials[i].status;
    if (status.state == State::done && status.metric && std::isfinite(*status.metric))
      best.trials.push_back(i);
  }
  return best;
}

std::string report_html(const Results& results, const std::string& recipe, const std::string& shown) {
  return records::page_html({results.plan.name + " · Capstan sweep", report_body(), report_script(),
                             data_text(results, recipe, shown)});
}

std::string report_html(const Results& results, const std::filesystem::path& directory) {
  std::string recipe;
  if (const auto best = best_configuration(results))
    recipe = read_file(directory / "trials" / results.plan.trials[best->trials.front()].id / "recipe.yaml",
                       4 << 20);
  return report_html(results, recipe, directory.string());
}

}  // namespace capstan::sweep
