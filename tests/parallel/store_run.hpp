// Training steps for the tests of the sharded store: recipe, losses, norms and state, and their comparison.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "parallel/flat_store.hpp"
#include "support/device_kind.hpp"
#include "support/strategies.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::test {

inline std::string text_of(config::ShardingStrategy strategy) {
  return std::string(config::enum_name(strategy));
}

template <class D>
config::Config store_config(int64_t ranks, int64_t micro_batches, bool llama = true) {
  config::Config c = testing::tiny_config(llama, ranks);
  c.train.device = device_kind(D::type);
  c.model.num_layers = 3;
  c.model.ffn_hidden_size = 70;
  // So large that no update depends on the rounding of a small gradient.
  c.optimizer.adam_eps = 1e-4;
  c.train.micro_batch_size = 1;
  c.train.global_batch_size = ranks * micro_batches;
  return c;
}

// Result of a run: losses, norms, and parameters and moments of all ranks together, by parameter.
struct StoreRun {
  std::vector<double> losses, norms;
  std::vector<std::vector<double>> values;
};

// The full values of each parameter, or of a state tensor, from the shards of all ranks.
inline std::vector<std::vector<double>> gathered(comm::Communicator& group, const parallel::FlatStore& store,
                                                 const std::vector<Tensor>* buffers) {
  std::vector<std::vector<double>> all;
  for (const auto& parameter : store.parameters())
    all.emplace_back(static_cast<size_t>(parameter->shape().elements()),
                     -std::numeric_limits<double>::infinity());
  for (const auto& shard : store.parameter_shards()) {
    const auto values =
        (buffers ? parallel::FlatStore::range_of(shard, shard.range, *buffers) : shard.values()).to_floats();
    std::copy(values.begin(), values.end(),
              all[static_cast<size_t>(shard.parameter->index())].begin() + shard.range.begin);
  }
  for (auto& values : all) comm::all_reduce(group, values, comm::ReduceOp::max);
  return all;
}

inline StoreRun run_store(const config::Config& config, comm::World& in, int steps = 2,
                          TapeObserver* observer = nullptr, bool gather = true) {
  train::StepRunner runner(config, in);
  runner.initialize();
  runner.observe(observer);
  const auto data = train::open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  train::StepTimers timers;
  StoreRun result;
  for (int s = 0; s < steps; ++s) {
    timers.start_step();
    const auto step = runner.train_step(loader, timers);
    result.losses.push_back(step.loss);
    result.norms.push_back(step.gradient_norm);
  }
  if (!gather) return result;
  result.values = gathered(in.communicator(), runner.store(), nullptr);
  for (const auto& state : runner.optimizer().state())
    for (auto& values : gathered(in.communicator(), runner.store(), &state.buffers))
      result.values.push_back(std::move(values));
  return result;
}

inline void check_close(const std::vector<double>& a, const std::vector<double>& b, double bound) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double distance = std::abs(a[i] - b[i]) / (std::abs(b[i]) + 1);
    if (!(distance <= worst)) worst = distance;
  }
  CHECK(worst <= bound);
}
// bound 0: bit by bit. Norms are sums over the shards of the ranks: equal but for the order of a sum in
// double.
inline void check_same(const StoreRun& a, const StoreRun& b, double bound) {
  check_close(a.losses, b.losses, bound);
  check_close(a.norms, b.norms, std::max(bound, 1e-12));
  REQUIRE(a.values.size() == b.values.size());
  for (size_t i = 0; i < a.values.size(); ++i) check_close(a.values[i], b.values[i], bound);
}

}  // namespace capstan::test
