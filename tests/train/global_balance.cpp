// Load balancing over the global batch, and jitter of the router's input, in training steps: what begins anew
// with each step, what is computed again, and what evaluation leaves alone.
#include <doctest/doctest.h>

#include "comm/collective_errors.hpp"
#include "support/running.hpp"
#include "support/temporary_directory.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/trainer/trainer.hpp"

using namespace capstan;
using namespace capstan::train;
using test::Running;
using test::world;

namespace {

config::Config balanced_config() {
  config::Config c = capstan::testing::tiny_config(true, world().size());
  auto& m = c.model;
  m.num_layers = 3, m.num_moe_experts = 5, m.moe_first_dense_layers = 1, m.moe_ffn_hidden_size = 16;
  m.moe_router_load_balancing_type = config::RouterBalancing::global_aux_loss;
  m.moe_aux_loss_coeff = 0.5;
  m.moe_input_jitter_eps = 0.1;
  m.init_method_std = 0.2;
  c.dist.expert_tensor_parallel_size = 1, c.dist.expert_data_parallel_size = world().size();
  c.train.micro_batch_size = 1, c.train.global_batch_size = 8;
  return c;
}

// Loss, gradient norm and balance losses of a step.
std::vector<double> numbers_of(const StepResult& step) {
  std::vector<double> numbers{step.loss, step.gradient_norm};
  for (const RouterResult& router : step.routers) numbers.push_back(router.balance_loss);
  return numbers;
}

}  // namespace

TEST_CASE("the load of the global batch changes gradients and begins with each step") {
  const config::Config config = balanced_config();
  config::Config of_micro_batch = config;
  of_micro_batch.model.moe_router_load_balancing_type = config::RouterBalancing::aux_loss;
  Running a(config), b(config), c(of_micro_batch);
  const StepResult first = a.step();
  CHECK(numbers_of(first) == numbers_of(b.step()));
  const StepResult other = c.step();
  CHECK(first.loss == other.loss);
  CHECK(first.gradient_norm != other.gradient_norm);
  for (const RouterResult& router : first.routers) {
    // With an equal load the loss is its coefficient.
    CHECK(router.balance_loss > 0.4);
    CHECK(router.balance_loss < 5 * 0.5);
  }
  // Evaluation counts nothing and has no noise: b evaluates twice alike, and goes on as a does.
  const double evaluated = b.runner.evaluate(b.data[0], 1);
  CHECK(b.runner.evaluate(b.data[0], 1) == evaluated);
  for (int step = 0; step < 3; ++step) CHECK(numbers_of(a.step()) == numbers_of(b.step()));
}

TEST_CASE("recomputed layers count once, and a step that is computed again has the same bits") {
  const config::Config config = balanced_config();
  config::Config recomputed = config;
  recomputed.model.recompute_granularity = config::RecomputeGranularity::full;
  recomputed.model.recompute_method = config::RecomputeMethod::uniform;
  recomputed.model.recompute_num_layers = 1;
  Running a(config), b(recomputed);
  for (int step = 0; step < 4; ++step) CHECK(numbers_of(a.step()) == numbers_of(b.step()));

  config::Config reruns = config;
  reruns.resilience.rerun_mode = config::RerunMode::validate_results;
  reruns.resilience.loss_spike_action = config::SpikeAction::warn;
  reruns.resilience.spike_window = 1;
  Running again(reruns), plain(config);
  again.runner.state().recent_losses = {1e-6};
  const StepResult step = again.step();
  // Ranks that compute other bits end the run.
  REQUIRE(step.anomalies.size() == 2);
  CHECK(step.anomalies[1].event == "rerun");
  CHECK(numbers_of(step) == numbers_of(plain.step()));
}

TEST_CASE("a resumed run with losses over the global batch has the same bits") {
  const config::Config config = balanced_config();
  Running a(config);
  for (int i = 0; i < 2; ++i) a.step();
  const test::TemporaryDirectory here;
  SavePlan plan;
  plan.root = comm::gather_texts(world().communicator(), here.path().string())[0];
  plan.run_id = "test", plan.recipe = "name: tiny\n", plan.recipe_hash = "0", plan.version = "test";
  const auto directory = save_state(world(), plan, a.runner.state(), a.runner.store(), a.runner.optimizer());
  auto reader = checkpoint::Reader::open(directory, checkpoint::Verification::content);
  Running other(config);
  other.runner.state() = load_state(reader, other.runner.store(), &other.runner.optimizer());
  other.open_loader();
  for (int i = 0; i < 2; ++i) CHECK(numbers_of(a.step()) == numbers_of(other.step()));
  world().communicator().barrier();
}
