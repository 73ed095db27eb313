// Days, failures, energy and cost of a run against values computed by hand.
#include "planner/budget.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "planner/counts.hpp"
#include "planner/published_rows.hpp"

using namespace capstan;
using namespace capstan::planner;

TEST_CASE("checkpoint intervals are those of Young and Daly") {
  // Saves of a minute, a failure a day: sqrt(2 * 60 * 86400), and with Daly's terms.
  CHECK(young_interval(60, 86'400) == doctest::Approx(3219.937888));
  CHECK(daly_interval(60, 86'400) == doctest::Approx(3180.062114));
  // Saves that take longer than the time between two failures.
  CHECK(daly_interval(200, 100) == 100);
  // 86400 e^(600/86400) (e^(3240.06/86400) - 1) seconds for 3180.06.
  CHECK(goodput(3180.062114, 60, 600, 86'400) == doctest::Approx(0.956528));
  // The best interval by trial is Daly's, to the accuracy of the series.
  double best = 0, at = 0;
  for (double interval = 1000; interval < 10'000; interval += 10)
    if (const double one = goodput(interval, 60, 600, 86'400); one > best) best = one, at = interval;
  CHECK(at == doctest::Approx(daly_interval(60, 86'400)).epsilon(0.01));
}

TEST_CASE("16384 H100 fail every three hours, as Llama 3 reports") {
  RunShape shape;
  shape.dp = 16'384, shape.global_batch = 16'384, shape.seq = 1024;
  const RunBudget budget = run_budget(shape, read_cluster("h100"), 1, 1e12, {});
  CHECK(54 * 86'400 / budget.mtbf_seconds == doctest::Approx(419).epsilon(1e-4));
  CHECK_FALSE(budget.recipe_goodput);
}

TEST_CASE("days, GPU hours, energy and cost follow from the time of a step") {
  RunShape shape;
  shape.layers = 2, shape.hidden = 1024, shape.heads = 8, shape.kv_groups = 8, shape.head_dim = 128;
  shape.ffn = 4096, shape.vocab = 50'000, shape.seq = 1000;
  shape.dp = 100, shape.micro_batch = 1, shape.global_batch = 1000;
  split_evenly(shape);
  Cluster cluster = read_cluster("h100");
  cluster.power = 500, cluster.power_usage_effectiveness = 1.5, cluster.price_per_hour = 2;
  cluster.gpu_hours_between_failures = 1e6, cluster.restart_time = 100, cluster.storage_bandwidth = 1e-4;
  // A million tokens in a step of 36 s: 1000 steps are 10 hours.
  const RunBudget budget = run_budget(shape, cluster, 36, 1e9, {.every = 50});
  CHECK(budget.steps == 1000);
  CHECK(budget.compute_seconds == 36'000);
  CHECK(budget.mtbf_seconds == 36e6);
  // 14 bytes a parameter, over 100 GPUs at 0.1 MB/s.
  CHECK(budget.checkpoint_bytes == doctest::Approx(14 * total_parameters(shape)));
  CHECK(budget.save_seconds == doctest::Approx(14 * total_parameters(shape) / 100 / 1e5));
  CHECK(*budget.recipe_goodput == doctest::Approx(goodput(1800, budget.save_seconds, 100, 36e6)));
  CHECK(*budget.recipe_goodput < budget.goodput);
  CHECK(budget.seconds == doctest::Approx(36'000 / budget.goodput));
  const double hours = budget.seconds / 3600;
  CHECK(budget.gpu_hours == doctest::Approx(100 * hours));
  CHECK(*budget.energy_mwh == doctest::Approx(100 * hours * 0.5 * 1.5 / 1000));
  CHECK(*budget.cost == doctest::Approx(200 * hours));
  // An asynchronous save stops the steps for the copy to the host.
  const RunBudget asynchronous = run_budget(shape, cluster, 36, 1e9, {.every = 50, .asynchronous = true});
  CHECK(asynchronous.save_seconds == doctest::Approx(budget.checkpoint_bytes / 100 / 50e9));
  CHECK(asynchronous.write_seconds == budget.save_seconds);
  CHECK(asynchronous.goodput > budget.goodput);
  // A save without moments and main parameters has the two bytes of each parameter.
  const RunBudget small = run_budget(shape, cluster, 36, 1e9, {.every = 50, .optimizer = false});
  CHECK(small.checkpoint_bytes == doctest::Approx(2 * total_parameters(shape)));
  // The last step is a full one.
  CHECK(run_budget(shape, cluster, 36, 1, {}).compute_seconds == 36);
}

TEST_CASE("a compute budget buys its FLOPs by those of a token") {
  RunShape shape;
  shape.layers = 4, shape.hidden = 512, shape.heads = 8, shape.kv_groups = 8, shape.head_dim = 64;
  shape.ffn = 2048, shape.vocab = 1024, shape.seq = 128, shape.tied = true;
  split_evenly(shape);
  // 6 (L (2 h (q + k) + 2 h f) + h V + L q s), as docs/planning.md has it.
  const double token = 6.0 * (4.0 * (2 * 512 * 1024 + 2 * 512 * 2048) + 512 * 1024 + 4 * 512 * 128);
  CHECK(tokens_of_compute(shape, 1e18) == doctest::Approx(1e18 / token));
  CHECK(tokens_of_compute_by_parameters(shape, 1e18) ==
        doctest::Approx(1e18 / (6 * total_parameters(shape))));
}
