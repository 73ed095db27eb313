// A step runner with its data, for tests of training steps on the test's world.
#pragma once

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/main_parameters.hpp"
#include "support/saves.hpp"
#include "support/worlds.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::test {

struct Running {
  explicit Running(const config::Config& c)
      : config(c),
        runner(config, world()),
        data(train::open_datasets(config, train::load_tokenizer(config).get())) {
    runner.initialize();
    open_loader();
  }
  // Where the runner's state is, for instance after it was loaded.
  void open_loader() { loader = std::make_unique<data::Loader>(data[0], runner.loader_options()); }
  train::StepResult step() {
    timers.start_step();
    return runner.train_step(*loader, timers);
  }
  // Main parameters of this rank, concatenated.
  std::vector<float> parameters() {
    std::vector<float> all;
    for (const auto& p : runner.model().parameters()) {
      const auto values = main_of(runner.store(), *p).to_host<float>();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  // Makes a value of this rank's last parameter NaN. Returns the name of the parameter.
  std::string spoil_last_parameter() {
    const auto& shard = runner.store().parameter_shards().back();
    std::vector<float> values = shard.values().to_floats();
    values[1] = std::nanf("");
    runner.store().before_load();
    shard.values().copy_from_host_bytes(std::as_bytes(std::span(std::as_const(values))));
    shard.set_changed();
    runner.store().after_load();
    return shard.parameter->name();
  }
  config::Config config;
  train::StepRunner runner;
  std::array<std::shared_ptr<const data::Dataset>, 3> data;
  std::unique_ptr<data::Loader> loader;
  train::StepTimers timers;
};

// Losses and gradient norms of the steps up to `until`.
inline std::vector<double> run_until(train::StepRunner& runner, const config::Config& config, int64_t until) {
  const auto data = train::open_datasets(config, train::load_tokenizer(config).get());
  data::Loader loader(data[0], runner.loader_options());
  train::StepTimers timers;
  std::vector<double> trace;
  while (runner.state().step < until) {
    timers.start_step();
    const train::StepResult result = runner.train_step(loader, timers);
    trace.insert(trace.end(), {result.loss, result.gradient_norm});
  }
  return trace;
}
inline std::vector<double> run(const config::Config& config, int64_t until) {
  train::StepRunner runner(config, world());
  runner.initialize();
  return run_until(runner, config, until);
}

// Compares a run of `steps` steps with one that ends after `saved` steps and is resumed from its checkpoint,
// bit by bit. `look` sees the checkpoint. Returns losses and gradient norms.
inline std::vector<double> check_resume(const config::Config& config, int64_t steps, int64_t saved,
                                        const std::function<void(const checkpoint::Reader&)>& look = {}) {
  const std::vector<double> full = run(config, steps);
  const SharedDirectory root;
  {
    train::StepRunner runner(config, world());
    runner.initialize();
    run_until(runner, config, saved);
    save_in(root.path(), runner);
  }
  checkpoint::Reader reader = newest_in(root.path());
  if (look) look(reader);
  train::StepRunner runner(config, world());
  runner.initialize();
  load_into(runner, std::move(reader));
  CHECK(runner.state().step == saved);
  CHECK(std::vector<double>(full.begin() + 2 * saved, full.end()) == run_until(runner, config, steps));
  return full;
}

}  // namespace capstan::test
