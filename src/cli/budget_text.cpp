#include "cli/budget_text.hpp"

#include <cmath>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/table.hpp"
#include "planner/counts.hpp"

namespace capstan::cli {

namespace {

// Days, or years of a run that takes more than 1000 of them.
std::string time_text(double seconds) {
  const double years = seconds / (365.25 * 86400);
  return years < 1000 ? human_duration(seconds) : human_count(years) + " years";
}

std::string steps_text(double steps) {
  // More do not fit an integer.
  if (steps > 1e15) return human_count(steps) + " steps";
  const auto count = std::llround(steps);
  return with_separators(count) + " " + plural(count, "step");
}

std::string percent_text(double fraction) {
  return fixed(100 * fraction, 1) + "%";
}

std::string energy_text(double mwh) {
  return mwh < 1 ? significant(1e3 * mwh, 3) + " kWh" : with_separators(std::llround(mwh)) + " MWh";
}

// What the compute budget buys by two conventions, and how it stands to the model's size.
std::string compute_text(const planner::RunShape& shape, double compute) {
  const double parameters = planner::active_parameters(shape),
               simple = planner::tokens_of_compute_by_parameters(shape, compute),
               tokens = planner::tokens_of_compute(shape, compute);
  return significant(compute, 3) + " FLOP: " + human_count(tokens) + " tokens at " +
         human_flop(planner::flops_per_token(shape)) + " a token (causal attention, output layer); by 6 N " +
         human_count(simple) + ", N " + human_count(parameters) + "; " + fixed(tokens / parameters, 1) +
         " tokens a parameter" +
         // For adapters of a model that is trained already the rule says nothing.
         (shape.adapters ? "" : " (about 20 is compute-optimal, Hoffmann et al. 2022)");
}

std::string saves_text(const planner::RunBudget& b) {
  std::string text = "every " + human_duration(b.interval_steps * b.step_seconds) + " (" +
                     steps_text(b.interval_steps) + "; Daly 2006): goodput " + percent_text(b.goodput);
  text += b.recipe_goodput ? "; as the recipe saves " + percent_text(*b.recipe_goodput)
                           : "; the recipe never saves";
  return text + "; a save of " + human_bytes(b.checkpoint_bytes) + " stops the steps for " +
         human_duration(b.save_seconds);
}

}  // namespace

std::string budget_text(const planner::RunShape& shape, const planner::Cluster& cluster,
                        const planner::RunBudget& b, double compute) {
  Table table;
  if (compute > 0) table.add({"  compute", compute_text(shape, compute)});
  table.add({"  time", b.ends() ? time_text(b.seconds) + ", of which " + time_text(b.compute_seconds) +
                                      " are steps that count; " + human_count(b.gpu_hours) + " GPU hours"
                                : "it never ends: failures come before saves"});
  table.add({"  failures", "one in " + human_duration(b.mtbf_seconds) + " (" +
                               human_count(cluster.gpu_hours_between_failures) +
                               " GPU hours between two), and " + human_duration(cluster.restart_time) +
                               " to the next step"});
  table.add({"  saves", saves_text(b)});
  if (b.energy_mwh && b.ends())
    table.add({"  energy", energy_text(*b.energy_mwh) + " (" + fixed(*cluster.power, 0) + " W a GPU, PUE " +
                               fixed(cluster.power_usage_effectiveness, 2) + "; without the hosts)"});
  if (b.cost && b.ends())
    table.add(
        {"  cost", human_count(*b.cost) + " at " + significant(*cluster.price_per_hour, 4) + " a GPU hour"});
  return "\nrun of " + human_count(b.tokens) + " tokens, " + steps_text(b.steps) + ", " +
         significant(b.flops, 3) + " FLOP:\n" + table.text();
}

OrderedJson budget_json(const planner::RunBudget& b) {
  OrderedJson json = {{"tokens", b.tokens},
                      {"steps", b.steps},
                      {"flops", b.flops},
                      {"compute_seconds", b.compute_seconds},
                      {"seconds_between_failures", b.mtbf_seconds},
                      {"checkpoint_bytes", static_cast<int64_t>(b.checkpoint_bytes)},
                      {"save_seconds", b.save_seconds},
                      {"write_seconds", b.write_seconds},
                      {"save_interval_steps", static_cast<int64_t>(b.interval_steps)},
                      {"goodput", b.goodput},
                      {"recipe_goodput", b.recipe_goodput ? OrderedJson(*b.recipe_goodput) : OrderedJson()}};
  // null: not known, or the run does not end.
  const auto add = [&](const char* key, const std::optional<double>& value) {
    json[key] = value && b.ends() ? OrderedJson(*value) : OrderedJson();
  };
  add("seconds", b.seconds), add("gpu_hours", b.gpu_hours);
  add("energy_mwh", b.energy_mwh), add("cost", b.cost);
  return json;
}

}  // namespace capstan::cli
