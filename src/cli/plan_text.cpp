#include "cli/plan_text.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/table.hpp"
#include "planner/counts.hpp"

namespace capstan::cli {

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fixed(1e6 * seconds, 0) + " us";
  return seconds < 1 ? fixed(1e3 * seconds, 1) + " ms" : fixed(seconds, 2) + " s";
}

std::string part_name(const std::string& name) {
  std::string text = name;
  std::replace(text.begin(), text.end(), '_', ' ');
  return text == "gemm" ? "GEMMs" : text;
}

std::string title_text(const std::string& recipe, const planner::Plan& plan) {
  const planner::Cluster& c = plan.cluster;
  return recipe + ", " + human_count(planner::total_parameters(plan.shape)) + " parameters, on " + c.name +
         " (" + c.gpu + ", " + std::to_string(c.gpus_per_node) + " per node)";
}

// The names of the presets of `ddp`.
static std::string_view sharding_text(config::ShardingStrategy strategy) {
  constexpr std::string_view kNames[] = {"no sharding", "ZeRO 1", "ZeRO 2", "ZeRO 3"};
  return kNames[static_cast<size_t>(strategy)];
}

std::string layout_text(const planner::RunShape& s) {
  std::string text = counted(s.gpus(), "GPU") + ": tp " + std::to_string(s.tp);
  const auto add = [&](const char* name, int64_t size) {
    if (size > 1) text += std::string(", ") + name + " " + std::to_string(size);
  };
  add("pp", s.pp);
  if (s.pp > 1)
    text += " (" + std::string(config::enum_name(s.schedule)) +
            (s.vpp > 1 ? ", " + counted(s.vpp, "chunk") + " each" : "") + ")";
  add("cp", s.cp);
  if (s.experts) add("ep", s.ep), add("etp", s.etp);
  return text + ", dp " + std::to_string(s.dp) + ", " + std::string(sharding_text(s.sharding)) + "; " +
         counted(s.micro_batches(), "micro-batch") + " of " + std::to_string(s.micro_batch) + " x " +
         std::to_string(s.seq) + " tokens";
}

namespace {

using planner::Plan;
using planner::RankMemory;
using planner::RunShape;

std::string range_text(double low, double high, int digits) {
  return fixed(low, digits) + " to " + fixed(high, digits);
}

std::string percent_text(double fraction) {
  return fixed(100 * fraction, 1) + "%";
}

// A GPU has hundreds, a processor less than one.
std::string tflops_text(double tflops) {
  return tflops < 10 ? significant(tflops, 2) : fixed(tflops, 0);
}

std::string fit_text(const Plan& plan) {
  const RankMemory& memory = plan.memory[plan.fullest];
  const auto usable = static_cast<double>(plan.cluster.usable_memory.value);
  const char* fitting = memory.total() > usable ? "does not fit" : plan.fits ? "fits" : "GPU memory fits";
  return std::string(fitting) + ": pipeline rank " + std::to_string(plan.fullest) + " needs " +
         human_bytes(memory.total()) + " of " + human_bytes(usable) + " usable (" +
         percent_text(memory.total() / usable) + "), " +
         (memory.exact ? "exact: the trainer's step on the meta device" : "by formula") + "\n";
}

// Of runs that offload, or that the host does not fit.
std::string host_text(const Plan& plan) {
  const auto& limit = plan.cluster.host_memory;
  const bool exceeds = planner::exceeds_host(plan.cluster, plan.host_bytes);
  if (!exceeds && plan.shape.offloaded_layers == 0 && plan.shape.offloaded_state == 0) return "";
  const std::string most = limit ? " of " + human_bytes(static_cast<double>(limit->value))
                                 : ", not limited: cluster " + plan.cluster.name + " has no `host_memory`";
  return std::string(exceeds ? "host memory does not fit" : "host memory") + ": the " +
         counted(planner::ranks_of_node(plan.shape, plan.cluster), "rank") + " of a node need " +
         human_bytes(plan.host_bytes) + most + "\n";
}

std::string speed_text(const Plan& plan) {
  const auto per_second = [&](double seconds) { return planner::tokens_per_second(plan.shape, seconds); };
  const auto tflops = [&](double seconds) { return planner::tflops_per_gpu(plan.shape, seconds); };
  const auto mfu = [&](double seconds) {
    return 100 * planner::model_flops_utilization(plan.shape, plan.cluster, seconds);
  };
  const double fast = plan.time.fastest, slow = plan.time.slowest;
  return "step: " + seconds_text(plan.time.seconds) + " (" + seconds_text(fast) + " to " +
         seconds_text(slow) + "), " + human_count(plan.tokens_per_second) + " tokens/s (" +
         human_count(per_second(slow)) + " to " + human_count(per_second(fast)) + ")\n" +
         "per GPU: " + fixed(plan.tokens_per_second / static_cast<double>(plan.shape.gpus()), 0) +
         " tokens/s, " + tflops_text(plan.tflops_per_gpu) + " model TFLOP/s (" + tflops_text(tflops(slow)) +
         " to " + tflops_text(tflops(fast)) + "; causal attention), MFU " + fixed(100 * plan.mfu, 1) + "% (" +
         range_text(mfu(slow), mfu(fast), 0) + "%)\n";
}

// Rows of equal memory are shown once.
std::string memory_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows(1);
  rows[0] = {"rank", "layers"};
  for (size_t i = 0; i < kMemoryCategories; ++i)
    rows[0].emplace_back(name_of(static_cast<MemoryCategory>(i)));
  rows[0].insert(rows[0].end(), {"cached", "total", "host memory", "source"});
  for (size_t rank = 0; rank < plan.memory.size(); ++rank) {
    const RankMemory& memory = plan.memory[rank];
    int64_t layers = 0;
    for (size_t i = 0; i < plan.shape.stages.size(); ++i)
      if (plan.shape.stage_ranks[i] == static_cast<int64_t>(rank)) layers += plan.shape.stages[i].layers();
    std::vector<std::string> row{std::to_string(rank), std::to_string(layers)};
    const auto add = [&](double bytes) { row.push_back(bytes > 0 ? human_bytes(bytes) : ""); };
    for (const double bytes : memory.bytes) add(bytes);
    add(memory.cached), add(memory.total()), add(memory.host);
    row.emplace_back(memory.exact ? "exact" : "formula");
    rows.push_back(std::move(row));
  }
  for (size_t column = rows[0].size(); column-- > 0;) {
    bool empty = true;
    for (size_t i = 1; i < rows.size(); ++i) empty &= rows[i][column].empty();
    if (!empty) continue;
    for (auto& row : rows) row.erase(row.begin() + static_cast<std::ptrdiff_t>(column));
  }
  Table table;
  for (auto& row : rows) table.add(std::move(row));
  return "\nmemory of a rank, by pipeline rank:\n" + table.text();
}

std::string parts_table(const Plan& plan) {
  Table table;
  table.add({"part", "seconds", "of the step", "hidden"});
  for (const planner::TimePart& part : plan.parts) {
    if (part.exposed < 5e-7 && part.hidden < 5e-7) continue;
    const auto shown = [](double seconds) { return seconds < 5e-7 ? "" : seconds_text(seconds); };
    table.add({part_name(part.name), shown(part.exposed),
               part.exposed < 5e-7 ? "" : percent_text(part.exposed / plan.time.seconds),
               shown(part.hidden)});
  }
  return "\ntime of a step, of the pipeline rank that works longest:\n" + table.text();
}

// "+0.52 s (+12%)", "-1.20 s (-8%)" or "none".
std::string price_text(const Plan& plan, const planner::Change& change) {
  const double more = change.seconds - plan.time.seconds;
  if (std::abs(more) < 5e-4 * plan.time.seconds) return "none";
  return (more < 0 ? "-" : "+") + seconds_text(std::abs(more)) + " (" + (more < 0 ? "" : "+") +
         fixed(100 * more / plan.time.seconds, 0) + "%)";
}

constexpr double kWorthAWord = 1 << 28;  // bytes

std::string changes_text(const Plan& plan, const std::vector<planner::Change>& changes) {
  if (changes.empty())
    return plan.fits ? "\nno single change that was tried makes it faster by 2% and fits\n"
                     : "\nno change that was tried makes it fit; use more GPUs, or GPUs with more memory\n";
  Table table;
  std::vector<std::string> head{"step", "price", "memory", "overrides"};
  if (!plan.fits) head.insert(head.begin(), "change");
  table.add(std::move(head));
  bool uses_host = false;
  for (const planner::Change& change : changes) {
    std::vector<std::string> row{seconds_text(change.seconds), price_text(plan, change),
                                 human_bytes(change.bytes) + (change.exact ? "" : " by formula"),
                                 shell_line(change.overrides)};
    // Buffers of the loader are not worth a word.
    if (change.host_bytes > plan.memory[plan.fullest].host + kWorthAWord) {
      row[2] += ", host " + human_bytes(change.host_bytes);
      uses_host = true;
    }
    if (!plan.fits) row.insert(row.begin(), change.name);
    table.add(std::move(row));
  }
  const bool unlimited = uses_host && !plan.cluster.host_memory;
  return std::string(plan.fits ? "\nfaster:\n" : "\nfits with:\n") + table.text() +
         (unlimited ? "host memory is not limited: cluster " + plan.cluster.name + " has no `host_memory`\n"
                    : "");
}

}  // namespace

std::string plan_text(const std::string& recipe, const Plan& plan,
                      const std::vector<planner::Change>& changes) {
  std::string text = title_text(recipe, plan) + "\n" + layout_text(plan.shape) + "\n\n" + fit_text(plan) +
                     host_text(plan) + speed_text(plan);
  for (const std::string& warning : plan.warnings) text += "note: " + warning + "\n";
  text += memory_table(plan) + parts_table(plan) + "\nlimits:\n";
  for (const std::string& limit : plan.limits) text += "  " + limit + "\n";
  return text + changes_text(plan, changes);
}

// The sizes of a layout.
static OrderedJson layout_json(const RunShape& s) {
  OrderedJson json = {{"tp", s.tp},
                      {"pp", s.pp},
                      {"vpp", s.vpp},
                      {"cp", s.cp},
                      {"ep", s.ep},
                      {"etp", s.etp},
                      {"dp", s.dp},
                      {"micro_batch", s.micro_batch},
                      {"sharding", config::enum_name(s.sharding)},
                      {"recomputation", planner::recomputation_text(s)}};
  json["schedule"] = s.pp > 1 ? OrderedJson(config::enum_name(s.schedule)) : OrderedJson();
  return json;
}

OrderedJson plan_json(const std::string& recipe, const Plan& plan,
                      const std::vector<planner::Change>& changes) {
  const planner::StepTime& t = plan.time;
  const auto integer = [](double value) { return static_cast<int64_t>(value); };
  const auto memory_of = [&](const RankMemory& memory) {
    OrderedJson object = {{"total", integer(memory.total())}};
    for (size_t i = 0; i < kMemoryCategories; ++i)
      object[std::string(name_of(static_cast<MemoryCategory>(i)))] = integer(memory.bytes[i]);
    object["cached"] = integer(memory.cached);
    return object;
  };
  OrderedJson json = {
      {"schema", "capstan.plan/1"},
      {"recipe", recipe},
      {"cluster", plan.cluster.name},
      {"gpu", plan.cluster.gpu},
      {"calibration", std::string(config::enum_name(plan.cluster.calibration))},
      {"gpus", plan.shape.gpus()},
      {"layout", layout_json(plan.shape)},
      {"fits", plan.fits},
      {"memory_bytes", memory_of(plan.memory[plan.fullest])},
      {"memory_exact", plan.memory[plan.fullest].exact},
      {"usable_memory_bytes", plan.cluster.usable_memory.value},
      {"host_memory_bytes_of_node", integer(plan.host_bytes)},
      {"host_memory_limit_bytes",
       plan.cluster.host_memory ? OrderedJson(plan.cluster.host_memory->value) : OrderedJson()},
      {"step_seconds", t.seconds},
      {"step_seconds_range", {t.fastest, t.slowest}},
      {"tokens_per_second", plan.tokens_per_second},
      {"tflops_per_gpu", plan.tflops_per_gpu},
      {"flop_convention", "causal"},
      {"mfu", plan.mfu},
      {"mfu_range", {plan.mfu * t.seconds / t.slowest, plan.mfu * t.seconds / t.fastest}},
      {"parameters", integer(planner::total_parameters(plan.shape))},
      {"flops_per_token", planner::flops_per_token(plan.shape)}};
  json["limits"] = plan.limits;
  json["warnings"] = plan.warnings;
  json["parts"] = OrderedJson::object();
  for (const planner::TimePart& part : plan.parts)
    json["parts"][part.name] = {{"seconds", part.exposed}, {"hidden_seconds", part.hidden}};
  json["stages"] = OrderedJson::array();
  for (size_t rank = 0; rank < plan.memory.size(); ++rank)
    json["stages"].push_back({{"pipeline_rank", rank},
                              {"memory_bytes", memory_of(plan.memory[rank])},
                              {"memory_exact", plan.memory[rank].exact}});
  json["changes"] = OrderedJson::array();
  for (const planner::Change& change : changes)
    json["changes"].push_back({{"name", change.name},
                               {"overrides", change.overrides},
                               {"step_seconds", change.seconds},
                               {"memory_bytes", integer(change.bytes)},
                               {"host_memory_bytes", integer(change.host_bytes)},
                               {"memory_exact", change.exact}});
  return json;
}

// "recomputation +1.20 s, pipeline bubble -310.0 ms": the parts that differ most from the first layout.
static std::string differences_text(const planner::Layout& best, const planner::Layout& other) {
  std::string text;
  const auto parts = planner::differences(best, other);
  for (size_t i = 0; i < 3; ++i) {
    const auto& [name, seconds] = parts[i];
    if (std::abs(seconds) < 0.1 * std::abs(parts[0].second) || std::abs(seconds) < 1e-6) break;
    text += (i == 0 ? "" : ", ") + part_name(name) + (seconds < 0 ? " -" : " +") +
            seconds_text(std::abs(seconds));
  }
  return text;
}

// Overrides of a layout as a line.
static std::string layout_line(const planner::Layout& one) {
  return (one.is_recipe() ? "the recipe as it is" : shell_line(one.overrides)) + "\n";
}

std::string search_text(const std::string& recipe, const planner::Cluster& cluster,
                        const planner::SearchResult& result) {
  std::string text = recipe + " on " + cluster.name + ": " + with_separators(result.tried) +
                     " layouts, of which " + with_separators(result.fitting) + " fit by formula\n";
  if (result.layouts.empty()) return text + "none of them is a legal recipe that fits\n";
  Table table;
  const bool experts = result.layouts.front().shape.experts.has_value();
  std::vector<std::string> head{"", "tp", "pp", "vpp", "cp"};
  if (experts) head.insert(head.end(), {"ep", "etp"});
  head.insert(head.end(), {"dp", "schedule", "sharding", "micro-batch", "recompute", "step", "MFU", "memory",
                           "front", "differs from the first by"});
  table.add(std::move(head));
  const planner::Layout& best = result.layouts.front();
  for (size_t i = 0; i < result.layouts.size(); ++i) {
    const planner::Layout& one = result.layouts[i];
    const RunShape& s = one.shape;
    std::vector<std::string> row{std::to_string(i + 1)};
    for (const int64_t size : {s.tp, s.pp, s.vpp, s.cp}) row.push_back(std::to_string(size));
    if (experts) row.push_back(std::to_string(s.ep)), row.push_back(std::to_string(s.etp));
    row.push_back(std::to_string(s.dp));
    row.emplace_back(s.pp > 1 ? config::enum_name(s.schedule) : "");
    row.emplace_back(sharding_text(s.sharding));
    row.push_back(std::to_string(s.micro_batch));
    row.push_back(planner::recomputation_text(s));
    row.push_back(seconds_text(one.time.seconds));
    row.push_back(percent_text(planner::model_flops_utilization(s, cluster, one.time.seconds)));
    row.push_back(human_bytes(one.bytes) + (one.exact ? "" : " by formula"));
    row.emplace_back(one.on_front ? "*" : "");
    row.push_back(i == 0 ? "" : differences_text(best, one));
    table.add(std::move(row));
  }
  text += "\n" + table.text() +
          "\nfront *: no other layout of the list is faster with as little memory, or as fast with less\n";
  text += "the first: " + layout_line(best);
  for (size_t i = 1; i < result.layouts.size(); ++i) {
    const planner::Layout& one = result.layouts[i];
    if (one.on_front || one.is_recipe()) text += std::to_string(i + 1) + ": " + layout_line(one);
  }
  return text;
}

OrderedJson search_json(const std::string& recipe, const planner::Cluster& cluster,
                        const planner::SearchResult& result) {
  OrderedJson json = {{"schema", "capstan.plan-search/1"},
                      {"recipe", recipe},
                      {"cluster", cluster.name},
                      {"tried", result.tried},
                      {"fitting", result.fitting}};
  json["layouts"] = OrderedJson::array();
  for (const planner::Layout& one : result.layouts) {
    const RunShape& s = one.shape;
    OrderedJson layout = {{"overrides", one.overrides}, {"is_recipe", one.is_recipe()}};
    layout.update(layout_json(s));
    layout.update({{"fits", true},
                   {"memory_bytes", {{"total", static_cast<int64_t>(one.bytes)}}},
                   {"memory_exact", one.exact},
                   {"pareto_front", one.on_front},
                   {"step_seconds", one.time.seconds},
                   {"step_seconds_range", {one.time.fastest, one.time.slowest}},
                   {"tokens_per_second", planner::tokens_per_second(s, one.time.seconds)},
                   {"tflops_per_gpu", planner::tflops_per_gpu(s, one.time.seconds)},
                   {"mfu", planner::model_flops_utilization(s, cluster, one.time.seconds)}});
    layout["seconds_more_than_first"] = OrderedJson::object();
    for (const auto& [name, seconds] : planner::differences(result.layouts.front(), one))
      layout["seconds_more_than_first"][name] = seconds;
    json["layouts"].push_back(std::move(layout));
  }
  return json;
}

}  // namespace capstan::cli
