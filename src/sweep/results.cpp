#include "sweep/results.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "sweep/values.hpp"

namespace capstan::sweep {

// A metric that no trial has, although they have others, is misspelled.
static void refuse_unknown_metric(const Store& store, const Results& results) {
  std::set<std::string> known;
  for (size_t i = 0; i < results.trials.size(); ++i) {
    if (!results.trials[i].curve.empty()) return;
    known.merge(store.metric_names(results.plan.trials[i].id));
  }
  if (!known.empty())
    fail(ErrorCode::usage, "no trial has the metric `" + results.metric().name + "`",
         near_help(results.metric().name, {known.begin(), known.end()}, "metrics of these trials: "));
}

Results read_results(const Store& store, const std::optional<Metric>& metric) {
  Results results{store.plan(), {}};
  if (metric) results.plan.definition.metric = *metric;
  const std::vector<TrialStatus> statuses = store.statuses();
  for (size_t i = 0; i < results.plan.trials.size(); ++i) {
    TrialResult& trial = results.trials.emplace_back();
    const std::string& id = results.plan.trials[i].id;
    trial.status = statuses[i];
    trial.measured = store.measured(id);
    trial.curve = store.read_curve(id, results.metric().name);
    if (metric) trial.status.metric = summarized(trial.curve, *metric);
  }
  if (metric) refuse_unknown_metric(store, results);
  return results;
}

Metric metric_of(std::string_view text, const Metric& otherwise) {
  Metric metric = otherwise;
  const auto wrong = [&](const std::string& why) {
    fail(ErrorCode::usage, "`" + std::string(text) + "` is not a metric: " + why,
         "for example `loss`, `val/loss:best`, `loss:mean(last 20)` or `max accuracy:last`");
  };
  std::string_view rest = trim(text);
  for (const auto& [word, goal] :
       {std::pair{std::string_view("max "), Metric::Goal::max}, {"min ", Metric::Goal::min}})
    if (rest.starts_with(word)) {
      metric.goal = goal;
      rest = trim(rest.substr(word.size()));
      break;
    }
  const size_t colon = rest.rfind(':');
  if (const auto name = trim(rest.substr(0, colon)); !name.empty())
    metric.name = name;
  else
    wrong("it has no name");
  if (colon == std::string_view::npos) return metric;
  if (!metric.set_at(trim(rest.substr(colon + 1)))) wrong("last, best or mean(last N) follows the colon");
  return metric;
}

SeedStatistics seed_statistics(std::span<const double> values) {
  SeedStatistics statistics{static_cast<int64_t>(values.size()), std::numeric_limits<double>::quiet_NaN(),
                            std::nullopt};
  if (values.empty()) return statistics;
  const auto n = static_cast<double>(values.size());
  // Sums differences from the first value, so that large numbers that differ little keep their digits.
  double sum = 0;
  for (const double value : values) sum += value - values[0];
  statistics.mean = values[0] + sum / n;
  if (values.size() < 2) return statistics;
  double squares = 0;
  for (const double value : values) squares += (value - statistics.mean) * (value - statistics.mean);
  statistics.deviation = std::sqrt(squares / (n - 1));
  return statistics;
}

std::vector<std::string> short_names(std::span<const std::string> paths) {
  std::vector<std::string> names;
  for (const std::string& path : paths) {
    const auto clashes = [&](const std::string& name) {
      return std::any_of(paths.begin(), paths.end(), [&](const std::string& other) {
        return other != path && (other == name || other.ends_with("." + name));
      });
    };
    std::string name = path.substr(path.rfind('.') + 1);
    // An item of a list or map begins before its bracket.
    if (const size_t bracket = path.find('['); bracket != std::string::npos)
      name = path.substr(path.substr(0, bracket).rfind('.') + 1);
    while (name != path && clashes(name)) {
      const size_t before = path.size() - name.size() - 1;
      const size_t dot = before == 0 ? std::string::npos : path.rfind('.', before - 1);
      name = dot == std::string::npos ? path : path.substr(dot + 1);
    }
    names.push_back(std::move(name));
  }
  return names;
}

namespace {

// Paths that vary by themselves, and those of `link`, which vary as one.
std::vector<std::vector<std::string>> independent_axes(const Plan& plan) {
  std::vector<std::string> linked;
  std::vector<std::vector<std::string>> axes;
  // All rows have the paths of the first.
  const std::vector<Values>& link = plan.definition.link;
  for (const std::string& path : plan.varying)
    if (!link.empty() && !value_of(link.front(), path).empty())
      linked.push_back(path);
    else
      axes.push_back({path});
  if (!linked.empty()) axes.push_back(std::move(linked));
  return axes;
}

}  // namespace

std::optional<ExplainedVariance> explained_variance(const Results& results) {
  if (results.plan.definition.method != Method::grid) return std::nullopt;
  struct Point {
    const TrialPlan* trial;
    double value;
  };
  std::vector<Point> points;
  std::vector<double> values;
  for (size_t i = 0; i < results.trials.size(); ++i) {
    const TrialStatus& status = results.trials[i].status;
    if (status.state != State::done || !status.metric) continue;
    points.push_back({&results.plan.trials[i], *status.metric});
    values.push_back(*status.metric);
  }
  if (points.size() < 3) return std::nullopt;
  const double mean = seed_statistics(values).mean;
  double total = 0;
  for (const double value : values) total += (value - mean) * (value - mean);
  if (!(total > 0) || !std::isfinite(total)) return std::nullopt;

  ExplainedVariance explained;
  explained.n = static_cast<int64_t>(points.size());
  explained.rest = 1;
  for (std::vector<std::string>& paths : independent_axes(results.plan)) {
    std::map<std::vector<std::string>, std::vector<double>> groups;
    for (const Point& point : points) {
      std::vector<std::string> key;
      key.reserve(paths.size());
      for (const std::string& path : paths) key.push_back(value_of(point.trial->values, path));
      groups[key].push_back(point.value);
    }
    double between = 0;
    for (const auto& [key, group] : groups) {
      const double distance = seed_statistics(group).mean - mean;
      between += static_cast<double>(group.size()) * distance * distance;
    }
    explained.axes.push_back({std::move(paths), between / total});
    explained.rest -= between / total;
  }
  // In a grid with gaps several axes can explain the same variance.
  explained.rest = std::max(0.0, explained.rest);
  std::stable_sort(
      explained.axes.begin(), explained.axes.end(),
      [](const AxisImportance& a, const AxisImportance& b) { return a.importance > b.importance; });
  return explained;
}

}  // namespace capstan::sweep
