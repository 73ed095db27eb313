#include "planner/budget.hpp"

#include <algorithm>
#include <cmath>

#include "planner/adapters.hpp"
#include "planner/counts.hpp"

namespace capstan::planner {

double young_interval(double save_seconds, double mtbf_seconds) {
  return std::sqrt(2 * save_seconds * mtbf_seconds);
}

double daly_interval(double save_seconds, double mtbf_seconds) {
  if (save_seconds >= 2 * mtbf_seconds) return mtbf_seconds;
  const double ratio = save_seconds / (2 * mtbf_seconds);
  return young_interval(save_seconds, mtbf_seconds) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - save_seconds;
}

double goodput(double interval, double save_seconds, double restart_seconds, double mtbf_seconds) {
  return interval / (mtbf_seconds * std::exp(restart_seconds / mtbf_seconds) *
                     std::expm1((interval + save_seconds) / mtbf_seconds));
}

double tokens_of_compute(const RunShape& shape, double flops) {
  return flops / flops_per_token(shape);
}

double tokens_of_compute_by_parameters(const RunShape& shape, double flops) {
  return flops / (6 * active_parameters(shape));
}

RunBudget run_budget(const RunShape& s, const Cluster& c, double step_seconds, double tokens,
                     const SavePolicy& saves) {
  RunBudget b;
  b.tokens = tokens, b.step_seconds = step_seconds;
  b.steps = std::ceil(tokens / real(s.tokens_per_step()));
  b.flops = tokens * flops_per_token(s);
  b.compute_seconds = b.steps * step_seconds;
  const double gpus = real(s.gpus());
  b.mtbf_seconds = 3600 * c.gpu_hours_between_failures / gpus;

  const double state = s.parameter_bytes + (saves.optimizer ? s.main_bytes + s.moment_bytes : 0);
  b.checkpoint_bytes = s.frozen_base() ? all_adapters(s).total() * state : total_parameters(s) * state;
  const double of_gpu = b.checkpoint_bytes / gpus;
  b.write_seconds = of_gpu / (1e9 * c.storage_bandwidth);
  b.save_seconds = saves.asynchronous ? of_gpu / (1e9 * c.host_bandwidth) : b.write_seconds;

  const auto of_interval = [&](double interval) {
    return goodput(interval, b.save_seconds, c.restart_time, b.mtbf_seconds);
  };
  const double interval =
      std::max({daly_interval(b.save_seconds, b.mtbf_seconds), b.write_seconds, step_seconds});
  b.interval_steps = std::max(1.0, std::round(interval / step_seconds));
  b.goodput = of_interval(b.interval_steps * step_seconds);
  if (saves.every) b.recipe_goodput = of_interval(real(*saves.every) * step_seconds);
  b.seconds = b.compute_seconds / b.goodput;

  b.gpu_hours = gpus * b.seconds / 3600;
  if (c.power) b.energy_mwh = *c.power * c.power_usage_effectiveness * b.gpu_hours / 1e6;
  if (c.price_per_hour) b.cost = *c.price_per_hour * b.gpu_hours;
  return b;
}

}  // namespace capstan::planner
