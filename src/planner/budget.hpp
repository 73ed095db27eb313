// A run from its first to its last token: days, failures, saves, energy and cost; and the tokens of a compute
// budget.
#pragma once

#include <cstdint>
#include <optional>

#include "planner/cluster.hpp"
#include "planner/run_shape.hpp"

namespace capstan::planner {

// Checkpoint interval in seconds of computation that loses the least time, to first order: sqrt(2 C M), for
// saves of C seconds and a mean time M between failures (Young 1974, CACM 17(9)).
double young_interval(double save_seconds, double mtbf_seconds);

// The same to higher order: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C, and M where C >= 2M (Daly 2006,
// Future Generation Computer Systems 22(3)).
double daly_interval(double save_seconds, double mtbf_seconds);

// Expected fraction of the time that computes steps which are kept: I / (M e^(R/M) (e^((I + C)/M) - 1)), for
// an interval I, saves of C seconds, restarts of R seconds and exponentially distributed failures (the same
// paper).
double goodput(double interval, double save_seconds, double restart_seconds, double mtbf_seconds);

// Tokens for which training takes `flops`, by the convention of the plan (FlopConvention::causal); and by the
// usual estimate of 6 FLOPs for each parameter that computes a token (Kaplan et al. 2020).
double tokens_of_compute(const RunShape& shape, double flops);
double tokens_of_compute_by_parameters(const RunShape& shape, double flops);

// How a recipe saves: every so many steps, or never; and whether steps go on while files are written.
struct SavePolicy {
  std::optional<int64_t> every;
  bool asynchronous = false;
  // A save has main parameters and moments.
  bool optimizer = true;
};

struct RunBudget {
  double tokens = 0, steps = 0, flops = 0;
  double step_seconds = 0;
  // Steps alone, and with saves, failures and restarts.
  double compute_seconds = 0, seconds = 0;
  double gpu_hours = 0;
  // Failures of all GPUs together.
  double mtbf_seconds = 0;
  double checkpoint_bytes = 0;
  // Time for which a save stops the steps, and until its files are written.
  double save_seconds = 0, write_seconds = 0;
  // Interval by Daly, not shorter than a save takes; and its goodput.
  double interval_steps = 0, goodput = 1;
  // Goodput with the interval of the recipe. nullopt: it never saves.
  std::optional<double> recipe_goodput;
  // Megawatt-hours of GPUs at their full power and of the building; cost of the GPU hours.
  std::optional<double> energy_mwh, cost;
  // Whether the run ends in practice, and not only after a thousand times its steps, as where failures come
  // before saves.
  bool ends() const { return goodput >= 1e-3; }
};
RunBudget run_budget(const RunShape& shape, const Cluster& cluster, double step_seconds, double tokens,
                     const SavePolicy& saves);

}  // namespace capstan::planner
