#include "train/records/plot.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <vector>

#include "base/json.hpp"
#include "base/text.hpp"
#include "train/records/curve.hpp"
#include "train/records/expert_loads.hpp"
#include "train/records/metrics.hpp"
#include "train/records/page.hpp"
#include "train/records/page_files.hpp"
#include "train/records/run_list.hpp"

namespace capstan::records {

namespace {

struct Chart {
  // Name in the rows of logged steps. A curve of a part of it, such as a layer, is "KEY PART".
  const char* key;
  const char* title;
  double scale;
  bool logarithmic, smooth, wide;
};
constexpr std::array kCharts{
    Chart{"loss", "Loss", 1, false, true, true},
    Chart{"mtp_loss", "Losses of multi-token prediction", 1, false, true, false},
    Chart{"grad_norm", "Gradient norm", 1, true, true, false},
    Chart{"learning_rate", "Learning rate", 1, false, false, false},
    Chart{"tokens_per_second", "Tokens per second", 1, false, true, false},
    Chart{"mfu", "MFU, % of measured GEMM", 100, false, true, false},
    Chart{"expert_load", "Load of the busiest expert of each layer (1: balanced)", 1, false, true, false},
    Chart{"expert_dropped", "Choices of experts that were dropped, %", 100, false, true, false},
    Chart{"balance_loss", "Load-balancing loss of the routers", 1, false, true, false},
    Chart{"z_loss", "z-loss of the routers", 1, true, true, false},
    Chart{"memory_bytes", "Memory, MiB", 1.0 / (1 << 20), false, false, false},
};
// kMaxPoints, kMinPoints: of a curve. kLoadsOfAll: loads of experts, about five bytes each.
constexpr size_t kPointsOfAll = 300'000, kMaxPoints = 1500, kMinPoints = 60, kLoadsOfAll = 200'000;

// The curves of the load of experts: its maximum over its mean, by layer.
void add_expert_loads(const ReadRow& row, double step, std::map<std::string, std::vector<Point>>& curves) {
  constexpr std::string_view prefix = "expert_load_layer_";
  for (const auto& [name, load] : row.lists)
    if (name.starts_with(prefix) && !load.empty())
      curves["expert_load layer " + name.substr(prefix.size())].push_back(
          {step, *std::max_element(load.begin(), load.end()) * static_cast<double>(load.size())});
}

// The curves of the choices of experts that were dropped, by layer, in percent.
void add_dropped(const ReadRow& row, double step, std::map<std::string, std::vector<Point>>& curves) {
  constexpr std::string_view prefix = "expert_dropped_layer_";
  for (const auto& [name, dropped] : row.numbers)
    if (name.starts_with(prefix))
      curves["expert_dropped layer " + name.substr(prefix.size())].push_back({step, 100 * dropped});
}

// The curves of the losses of multi-token prediction, by depth, and of each of several load-balancing losses.
void add_parts_of_losses(const ReadRow& row, double step, std::map<std::string, std::vector<Point>>& curves) {
  constexpr std::string_view mtp = "mtp_", loss = "_loss", balance = "aux_loss";
  for (const auto& [name, value] : row.numbers)
    if (name.starts_with(mtp) && name.ends_with(loss))
      curves["mtp_loss depth " + name.substr(mtp.size(), name.size() - mtp.size() - loss.size())].push_back(
          {step, value});
    else if (name.ends_with(balance))
      curves["balance_loss " + name].push_back({step, value});
}

// One run as an object for page/runs.js. most, most_loads: points of a curve, and loads of experts.
std::string run_json(const std::filesystem::path& path, size_t most, size_t most_loads) {
  const RunSummary run = summarize(path);
  const RunDetails details = details_of(path);
  std::map<std::string, std::vector<Point>> curves;
  ExpertLoads experts(most_loads);
  std::error_code missing;
  if (std::filesystem::exists(path / "metrics.jsonl", missing))
    read_metrics(path / "metrics.jsonl", [&](const ReadRow& row) {
      if (!row.step) return;
      const auto x = static_cast<double>(*row.step);
      if (row.event == "validation") curves["validation"].push_back({x, row.number("loss")});
      if (!row.event.empty()) return;
      for (const Chart& chart : kCharts) {
        const bool memory = chart.key == std::string_view("memory_bytes");
        const double value = memory ? row.memory_bytes() : row.number(chart.key);
        curves[chart.key].push_back({x, value * chart.scale});
      }
      experts.add(row);
      add_expert_loads(row, x, curves);
      add_dropped(row, x, curves);
      add_parts_of_losses(row, x, curves);
    });
  const OrderedJson object = {{"name", path.string()},
                              {"recipe", run.recipe},
                              {"state", name_of(run.state)},
                              {"step", or_null(run.step)},
                              {"loss", or_null(run.last_loss)},
                              {"validation", or_null(details.validation_loss)},
                              {"test", or_null(details.test_loss)},
                              {"speed", or_null(details.tokens_per_second)},
                              {"started", run.started}};
  std::string text = dump_json(object);
  // The closing brace: the curves follow.
  text.pop_back();
  std::string all;
  // The layers of a deep model have fewer points each.
  const auto layers = static_cast<size_t>(std::count_if(curves.begin(), curves.end(), [](const auto& curve) {
    return curve.first.find(' ') != curve.first.npos;
  }));
  const size_t most_of_layer = std::min(most, std::max(kMinPoints, 4 * most / std::max<size_t>(1, layers)));
  for (const auto& [key, points] : curves)
    if (std::any_of(points.begin(), points.end(), [](const Point& p) { return std::isfinite(p.y); }))
      all += (all.empty() ? "" : ",") + in_quotes(key) + ":{" +
             curve_json(points, key.find(' ') == key.npos ? most : most_of_layer) + "}";
  const std::string loads = experts.json();
  return text + ",\"experts\":" + (loads.empty() ? "null" : loads) + ",\"curves\":{" + all + "}}";
}

}  // namespace

std::string plot_html(std::span<const std::filesystem::path> runs) {
  const size_t share = kPointsOfAll / std::max<size_t>(1, runs.size() * (kCharts.size() + 1));
  const size_t most = std::clamp(share, kMinPoints, kMaxPoints);
  const std::string title = runs.size() == 1 ? runs[0].string() : std::to_string(runs.size()) + " runs";
  std::vector<std::string> recipes;
  std::string objects;
  for (const std::filesystem::path& run : runs) {
    objects += (objects.empty() ? "\n" : ",\n") + run_json(run, most, kLoadsOfAll / runs.size());
    if (const std::string recipe = read_run_file(run).recipe;
        std::find(recipes.begin(), recipes.end(), recipe) == recipes.end())
      recipes.push_back(recipe);
  }
  OrderedJson root;
  root["title"] = title;
  root["subtitle"] = (recipes.size() == 1 ? "recipe " : "recipes ") + join(recipes, ", ");
  root["charts"] = OrderedJson::array();
  for (const Chart& chart : kCharts)
    root["charts"].push_back({{"key", chart.key},
                              {"title", chart.title},
                              {"log", chart.logarithmic},
                              {"smooth", chart.smooth},
                              {"wide", chart.wide}});
  const std::string script = std::string(experts_script()) + std::string(runs_script());
  std::string data = dump_json(root);
  data.pop_back();
  return page_html({title + " · Capstan", runs_body(), script, data + ",\"runs\":[" + objects + "]}"});
}

}  // namespace capstan::records
