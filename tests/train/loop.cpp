// The loop on any number of ranks: learning, determinism, resume and layouts.

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <set>

#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/main_parameters.hpp"
#include "support/running.hpp"
#include "support/strategies.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/setup/state.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;

namespace {

using test::check_resume;
using test::run;
using test::run_until;
using test::world;

// On the device of the test.
template <class D>
config::Config tiny_config(bool llama, int64_t ranks) {
  config::Config config = capstan::testing::tiny_config(llama, ranks);
  config.train.device = test::device_kind(D::type);
  return config;
}

}  // namespace

TEST_CASE_TEMPLATE("the loss starts at the logarithm of the vocabulary and falls; phases add up to the step",
                   D, EVERY_DEVICE) {
  for (const bool llama : {false, true}) {
    const auto config = tiny_config<D>(llama, world().size());
    constexpr size_t kSteps = D::kSlow ? 5 : 30;
    const auto trace = run(config, kSteps);
    CHECK(trace[0] == doctest::Approx(std::log(61.0)).epsilon(0.02));
    CHECK(trace[2 * kSteps - 2] < (D::kSlow ? 1 : 0.75) * trace[0]);
  }
  StepTimers timers;
  timers.enter(Phase::data), timers.enter(Phase::forward);
  const double total = timers.step_seconds();
  double sum = 0;
  for (size_t p = 0; p < kPhases; ++p) sum += timers.seconds(static_cast<Phase>(p));
  CHECK(sum == total);
}

TEST_CASE_TEMPLATE("optimizer.decoupled_lr moves embedding and head at a rate of their own, and nothing else",
                   D, EVERY_DEVICE) {
  auto config = tiny_config<D>(true, world().size());
  config.optimizer.weight_decay = 0;
  constexpr int64_t kSteps = D::kSlow ? 2 : 6;
  const auto expected = run(config, kSteps);
  config.optimizer.decoupled_lr = config.optimizer.lr;
  config.optimizer.decoupled_min_lr = config.optimizer.min_lr;
  CHECK(run(config, kSteps) == expected);
  config.optimizer.decoupled_lr = 1e-30;
  config.optimizer.decoupled_min_lr = 0;
  StepRunner before(config, world()), after(config, world());
  before.initialize();
  after.initialize();
  run_until(after, config, 3);
  int moved = 0, rested = 0;
  for (size_t i = 0; i < before.store().parameters().size(); ++i) {
    const Parameter& then = *before.store().parameters()[i];
    const Parameter& now = *after.store().parameters()[i];
    const bool own_rate =
        then.name().ends_with("word_embeddings.weight") || then.name().ends_with("output_layer.weight");
    const bool same = test::main_of(before.store(), then).to_host<float>() ==
                      test::main_of(after.store(), now).to_host<float>();
    CHECK_MESSAGE(same == own_rate, then.name());
    (same ? rested : moved) += 1;
  }
  CHECK(rested >= 1);
  CHECK(moved > 5);
}

TEST_CASE_TEMPLATE(
    "the same run twice, on the plain device, and with 2 and 3 threads or other workers, gives the same bits",
    D, EVERY_DEVICE) {
  auto config = tiny_config<D>(true, world().size());
  constexpr int64_t kSteps = D::kSlow ? 3 : 8;
  const auto expected = run(config, kSteps);
  CHECK(run(config, kSteps) == expected);
  test::check_cpu_numbers<D>(expected, run(tiny_config<test::Cpu>(true, world().size()), kSteps));
  for (int64_t threads : {2, 3}) {
    config.train.threads = threads;
    config.dataset.num_workers = threads - 2;
    CHECK(run(config, kSteps) == expected);
  }
}

TEST_CASE_TEMPLATE("micro-batch size, and the number of ranks, change the loss by rounding only", D,
                   EVERY_DEVICE) {
  auto config = tiny_config<D>(true, world().size());
  constexpr int64_t kSteps = D::kSlow ? 2 : 8;
  const auto expected = run(config, kSteps);
  config.train.micro_batch_size = 1;
  const auto other = run(config, kSteps);
  for (size_t i = 0; i < expected.size(); ++i) CHECK(other[i] == doctest::Approx(expected[i]).epsilon(1e-5));
  // The same on one rank: rank 0 runs it alone and broadcasts the result.
  const auto alone = comm::World::single_process();
  // bf16 activations round to 8 bits: sums that differ in their last fp32 bit now and then round to
  // neighbors.
  for (const auto& [precision, bound] :
       {std::pair(config::Precision::fp32, 1e-6), {config::Precision::bf16, 5e-5}}) {
    auto single = tiny_config<D>(true, 1), several = tiny_config<D>(true, world().size());
    single.mixed_precision.params_dtype = several.mixed_precision.params_dtype = precision;
    const auto all_ranks = run(several, kSteps);
    StepRunner runner(single, *alone);
    runner.initialize();
    const auto one_rank = run_until(runner, single, kSteps);
    for (size_t i = 0; i < all_ranks.size(); i += 2)  // losses; gradient norms are between them
      CHECK(std::abs(one_rank[i] - all_ranks[i]) <= bound * (std::abs(all_ranks[i]) + 1));
    if (precision == config::Precision::fp32)
      for (size_t i = 1; i < all_ranks.size(); i += 2)
        CHECK(std::abs(one_rank[i] - all_ranks[i]) <= 1e-6 * (std::abs(all_ranks[i]) + 1));
  }
}

TEST_CASE_TEMPLATE("dropout does not depend on micro-batches or ranks; recomputation changes nothing", D,
                   EVERY_DEVICE) {
  auto config = tiny_config<D>(false, world().size());
  config.model.hidden_dropout = config.model.attention_dropout = 0.1;
  constexpr int64_t kSteps = D::kSlow ? 2 : 4;
  const auto expected = run(config, kSteps);
  auto other = config;
  other.train.micro_batch_size = 1;
  const auto split = run(other, kSteps);
  for (size_t i = 0; i < expected.size(); ++i) CHECK(split[i] == doctest::Approx(expected[i]).epsilon(1e-5));
  other = config;
  other.model.recompute_granularity = config::RecomputeGranularity::full;
  other.model.recompute_method = config::RecomputeMethod::uniform;
  other.model.recompute_num_layers = 1;
  CHECK(run(other, kSteps) == expected);
}

TEST_CASE_TEMPLATE("weight decay of SGD through the runner: w loses lr * decay * w, vectors lose nothing", D,
                   EVERY_DEVICE) {
  auto config = tiny_config<D>(true, world().size());
  config.optimizer.optimizer = config::OptimizerKind::sgd;
  config.scheduler.lr_decay_style = config::LrDecayStyle::constant;
  config.scheduler.lr_warmup_iters = 0;
  std::vector<std::vector<std::vector<float>>> after;  // [no decay, decoupled, L2][parameter]
  std::vector<std::vector<float>> start;
  std::vector<std::vector<double>> traces;
  for (int kind = 0; kind < 3; ++kind) {
    config.optimizer.weight_decay = kind == 0 ? 0.0 : 0.5;
    config.optimizer.decoupled_weight_decay = kind == 1;
    StepRunner runner(config, world());
    runner.initialize();
    const auto values = [&] {
      std::vector<std::vector<float>> all;
      for (const auto& parameter : runner.store().parameters())
        all.push_back(test::main_of(runner.store(), *parameter).template to_host<float>());
      return all;
    };
    start = values();
    run_until(runner, config, 1);
    after.push_back(values());
    traces.push_back(run_until(runner, config, D::kSlow ? 2 : 4));
  }
  StepRunner names(config, world());
  for (size_t p = 0; p < start.size(); ++p) {
    const bool decays = !names.store().parameters()[p]->spec().no_weight_decay;
    const double lost = decays ? config.optimizer.lr * 0.5 : 0.0;
    for (size_t i = 0; i < start[p].size(); ++i)
      for (const int kind :
           {1, 2})  // the momentum is empty before the first step: both kinds are the same there
        CHECK(std::abs(static_cast<double>(after[static_cast<size_t>(kind)][p][i]) -
                       (static_cast<double>(after[0][p][i]) - lost * static_cast<double>(start[p][i]))) <
              1e-7);
  }
  CHECK(traces[1] != traces[0]);
  CHECK(traces[2] != traces[1]);
}

TEST_CASE_TEMPLATE("params_norm and num_zeros are those of the full model under every layout", D,
                   EVERY_DEVICE) {
  const auto alone = comm::World::single_process();
  const auto measured = [](StepRunner& runner, const config::Config& config) {
    const auto data = open_datasets(config, nullptr);
    data::Loader loader(data[0], runner.loader_options());
    StepTimers timers;
    runner.train_step(loader, timers);
    return runner.train_step(loader, timers);
  };
  auto single = tiny_config<D>(true, 1);
  StepRunner full(single, *alone);
  full.initialize();
  const StepResult silent = measured(full, single);
  CHECK(!silent.params_norm);
  CHECK(!silent.num_zeros);
  double squares = 0;
  for (const auto& parameter : full.store().parameters())
    for (const float value : test::main_of(full.store(), *parameter).template to_host<float>())
      squares += static_cast<double>(value) * static_cast<double>(value);
  single.logger.log_params_norm = single.logger.log_num_zeros_in_grad = true;
  StepRunner logged(single, *alone);
  logged.initialize();
  const StepResult expected = measured(logged, single);
  CHECK(*expected.params_norm == doctest::Approx(std::sqrt(squares)).epsilon(1e-12));
  CHECK(*expected.num_zeros > 0);  // tokens that no sample of the batch holds: rows of the embedding
  if (world().size() != 2) return;
  for (const int layout : {0, 1, 2, 3, 4, 5}) {
    CAPTURE(layout);
    auto config = tiny_config<D>(true, 2);
    config.logger = single.logger;
    if (layout < 4)
      config.ddp.data_parallel_sharding_strategy = test::kStrategies[layout];
    else
      config.dist.data_parallel_size = 1;
    if (layout == 4) config.dist.tensor_model_parallel_size = 2;
    if (layout == 5) {
      config.dist.pipeline_model_parallel_size = 2;
      config.dist.pipeline_model_parallel_layout = "Et|tL";
      config.dist.pipeline_schedule = config::PipelineSchedule::one_f_one_b;
    }
    StepRunner runner(config, world());
    runner.initialize();
    const StepResult result = measured(runner, config);
    CHECK(*result.params_norm == doctest::Approx(*expected.params_norm).epsilon(1e-6));
    CHECK(*result.num_zeros == *expected.num_zeros);
  }
}

TEST_CASE_TEMPLATE("resume is bitwise equal to the uninterrupted run, in every precision", D, EVERY_DEVICE) {
  constexpr int64_t kSteps = D::kSlow ? 4 : 9, kSaved = D::kSlow ? 2 : 5;
  for (const auto precision : {config::Precision::fp32, config::Precision::bf16, config::Precision::fp16}) {
    auto config = tiny_config<D>(true, world().size());
    config.mixed_precision.params_dtype = precision;
    config.mixed_precision.initial_loss_scale = 1024;
    check_resume(config, kSteps, kSaved);
  }
}

TEST_CASE(
    "resume is bitwise equal to the uninterrupted run with every optimizer, on the checked device too") {
  using config::MomentType;
  using config::OptimizerKind;
  struct Kind {
    const char* name;
    OptimizerKind optimizer;
    double lr;
    MomentType moments = MomentType::fp32;
  };
  for (const Kind& kind :
       {Kind{"sgd", OptimizerKind::sgd, 0.05}, Kind{"lion", OptimizerKind::lion, 1e-3},
        Kind{"muon", OptimizerKind::muon, 1e-3}, Kind{"bf16", OptimizerKind::adam, 1e-2, MomentType::bf16},
        Kind{"fp8", OptimizerKind::adam, 1e-2, MomentType::fp8}}) {
    CAPTURE(kind.name);
    auto config = tiny_config<test::Cpu>(true, world().size());
    config.optimizer.optimizer = kind.optimizer, config.optimizer.lr = kind.lr;
    config.optimizer.min_lr = kind.lr / 10;
    config.optimizer.exp_avg_dtype = config.optimizer.exp_avg_sq_dtype = kind.moments;
    config.optimizer.use_precision_aware_optimizer = config.optimizer.stochastic_rounding =
        kind.moments != MomentType::fp32;
    if (world().size() > 1) config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim;
    const auto on_cpu = check_resume(config, 5, 3);
    config.train.device = config::DeviceKind::checked;
    CHECK(check_resume(config, 5, 3) == on_cpu);
  }
}

TEST_CASE("Muon updates the matrices of the layers; Adam embeddings, output layer, norms and biases") {
  if (world().size() > 1) return;
  for (const bool llama : {false, true}) {
    auto config = tiny_config<test::Cpu>(llama, 1);
    config.optimizer.optimizer = config::OptimizerKind::muon;
    config.model.share_embeddings_and_output_weights = false;
    StepRunner runner(config, world());
    runner.initialize();
    std::map<std::string, std::set<std::string>> states;
    for (const StateTensor& tensor : state_tensors(runner.store(), &runner.optimizer())) {
      if (!tensor.name.starts_with("optimizer.")) continue;
      const size_t end = tensor.name.find('.', 10);
      states[tensor.name.substr(end + 1)].insert(tensor.name.substr(10, end - 10));
    }
    CHECK(states.count("output_layer.weight") == 1);
    CHECK(states.size() == runner.store().parameters().size());
    for (const auto& [parameter, names] : states) {
      CAPTURE(parameter);
      const bool linear = parameter.find(".linear_") != std::string::npos && parameter.ends_with(".weight");
      CHECK(names == (linear ? std::set<std::string>{"momentum_buffer"}
                             : std::set<std::string>{"exp_avg", "exp_avg_sq"}));
    }
  }
}

TEST_CASE_TEMPLATE("a loss that is not finite stops the run before the optimizer touches the state", D,
                   EVERY_DEVICE) {
  const auto config = tiny_config<D>(true, world().size());
  StepRunner runner(config, world());
  runner.initialize();
  run_until(runner, config, 2);
  const auto& parameter = *runner.model().parameters()[3];
  const auto before = test::main_of(runner.store(), parameter).to_host<float>();
  const auto& last = *runner.model().parameters().back();
  std::vector<float> poison(static_cast<size_t>(last.spec().shape.elements()),
                            std::numeric_limits<float>::quiet_NaN());
  test::main_of(runner.store(), last).copy_from_host_bytes(std::as_bytes(std::span(poison)));
  try {
    run_until(runner, config, 3);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::failed);
    CHECK(error.message().find("step 3: the loss is nan") == 0);
  }
  CHECK(test::main_of(runner.store(), parameter).to_host<float>() == before);
  CHECK(runner.state().step == 2);
  CHECK(runner.optimizer().steps() == 2);
}

TEST_CASE_TEMPLATE("a checkpoint of another model is refused with all differences", D, EVERY_DEVICE) {
  auto config = tiny_config<D>(true, world().size());
  const test::SharedDirectory root;
  StepRunner runner(config, world());
  runner.initialize();
  test::save_in(root.path(), runner);
  config.model.ffn_hidden_size = 128;
  config.model.qk_layernorm = true;
  StepRunner other(config, world());
  try {
    test::load_into(other, test::newest_in(root.path()));
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.message().find("does not fit the recipe's model") != std::string::npos);
    CHECK(error.message().find(" in the checkpoint, [") != std::string::npos);
    CHECK(error.message().find("linear_fc1.weight") != std::string::npos);
    CHECK(error.message().find("is missing") != std::string::npos);
  }
}
