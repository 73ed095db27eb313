// Results of a sweep that never ran, for tables and pages.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "sweep/results.hpp"

namespace capstan::sweep::test {

class MadeSweep {
 public:
  explicit MadeSweep(std::vector<Axis> axes) {
    results.plan.name = results.plan.definition.name = "made";
    results.plan.definition.base = "quickstart";
    results.plan.definition.metric.name = "loss";
    for (const Axis& axis : axes) results.plan.varying.push_back(axis.path);
    results.plan.definition.axes = std::move(axes);
  }

  // A finished trial; what is to be otherwise is changed in what is returned.
  TrialResult& add(const std::vector<std::string>& values, std::optional<int64_t> seed,
                   std::optional<double> metric, State state = State::done) {
    TrialPlan& plan = results.plan.trials.emplace_back();
    std::string words;
    for (size_t k = 0; k < values.size(); ++k) {
      plan.values.emplace_back(results.plan.varying[k], values[k]);
      words += (k ? "," : "") + short_names(results.plan.varying)[k] + "=" + values[k];
    }
    plan.label = words;
    plan.configuration = hex(std::hash<std::string>{}(words));
    plan.id = hex(results.plan.trials.size());
    plan.seed = seed;
    TrialResult& trial = results.trials.emplace_back();
    trial.status.state = state;
    trial.status.metric = metric;
    trial.status.attempt = 1;
    return trial;
  }

  Results results;

 private:
  static std::string hex(uint64_t value) {
    std::string text(8, '0');
    for (size_t i = 8; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
    return text;
  }
};

// Loss curves as training draws them, of `trials` trials: learning rate, layers, batch size, precision,
// seeds.
inline Results many_trials(int trials, int rows) {
  MadeSweep sweep({{.path = "optimizer.lr", .kind = AxisKind::log, .values = {}},
                   {.path = "model.num_layers", .values = {"2", "4", "6"}},
                   {.path = "train.global_batch_size", .values = {"8", "32", "128"}},
                   {.path = "mixed_precision", .kind = AxisKind::preset, .values = {"fp32", "bf16_mixed"}}});
  std::mt19937_64 random(7);
  std::normal_distribution<double> noise(0, 1);
  const int each = trials >= 100 ? 2 : 1;
  for (int i = 0; i < trials; ++i) {
    const int point = i / each;
    const int layers = 2 + 2 * (point % 3), batch = 8 << (2 * (point / 3 % 3)), half = point / 9 % 2;
    const double lr = std::pow(10, -4 + 2.0 * ((point * 37) % 101) / 100);
    const double off = std::log10(lr) + 2.9 + 0.15 * layers / 6;
    const double end = 2.6 + 0.9 * off * off - 0.08 * layers + 0.1 * std::log2(batch / 32.0) + 0.02 * half +
                       0.02 * noise(random);
    TrialResult& trial = sweep.add({to_text(std::round(lr * 1e8) / 1e8), std::to_string(layers),
                                    std::to_string(batch), half ? "bf16_mixed" : "fp32"},
                                   1 + i % each, std::nullopt);
    const bool pruned = off > 0.75 && i % 3 == 0, diverged = off > 0.85 && i % 7 == 1;
    const int last = pruned ? rows / 4 : diverged ? rows / 3 : rows;
    for (int step = 1; step <= last; ++step) {
      double loss = end + (9.0 - end) * std::exp(-6.0 * step / rows) + 0.05 * noise(random);
      if (diverged) loss += std::exp(0.1 * step * 60 / rows) * 0.01;
      trial.curve.push_back({step * 10, loss});
    }
    trial.status.step = trial.status.total_steps = last * 10;
    trial.status.metric = trial.curve.back().value;
    trial.status.seconds = 100 + 5 * layers;
    trial.measured = {40000.0 / layers + 100 * noise(random), (1 << 20) * 60.0 * layers};
    if (pruned)
      trial.status.state = State::pruned, trial.status.reason = "rung at step 500: 31st of 40, 13 go on";
    if (diverged) {
      trial.status.state = State::failed;
      trial.status.metric.reset();
      trial.status.reason = "exit code 1: the loss is not finite at step " + std::to_string(last * 10);
    }
  }
  return sweep.results;
}

}  // namespace capstan::sweep::test
