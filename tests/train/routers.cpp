// The metrics that a step reports of its routers: loads of the experts and losses, over all micro-batches and
// ranks.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include "base/json.hpp"
#include "base/philox.hpp"
#include "comm/reduce.hpp"
#include "runs.hpp"
#include "support/running.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"

using namespace capstan;
using namespace capstan::train;
using test::Running;
using test::world;

namespace {

constexpr int64_t kExperts = 4, kChoices = 2;
constexpr double kBalance = 0.02, kZ = 0.003;

// A dense layer, and three with experts.
config::Config router_config() {
  config::Config c = capstan::testing::tiny_config(true, world().size());
  auto& m = c.model;
  m.num_layers = 4, m.num_moe_experts = kExperts, m.moe_router_topk = kChoices;
  m.moe_first_dense_layers = 1, m.moe_ffn_hidden_size = 16, m.init_method_std = 0.2;
  m.moe_router_load_balancing_type = config::RouterBalancing::aux_loss;
  m.moe_aux_loss_coeff = kBalance, m.moe_z_loss_coeff = kZ;
  c.dist.expert_tensor_parallel_size = 1, c.dist.expert_data_parallel_size = world().size();
  c.train.micro_batch_size = 1, c.train.global_batch_size = 8;
  return c;
}

// The logits of each layer's router, in the micro-batches of this rank.
struct Logits final : TapeObserver {
  std::map<int64_t, std::vector<std::vector<float>>> of_layer;
  void observe(const TapeEvent&) override {}
  void values(char phase, const std::string& name, std::span<const Parameter* const> parameters,
              std::span<const Tensor> tensors) override {
    if (phase == 'F' && name == "router_logits")
      of_layer[parameters[0]->spec().layer].push_back(tensors[0].to_floats());
  }
};

// Of one layer: the choices of each expert, and the sums over the micro-batches of both losses, by the
// formulas of GShard and Switch (coefficient * experts * sum of f[e] P[e], f[e] the fraction of the choices
// that fell on expert e and P[e] its mean probability) and of ST-MoE (the mean of logsumexp^2).
std::vector<double> sums_of(const std::vector<std::vector<float>>& micro_batches) {
  std::vector<double> sums(kExperts + 2);
  for (const std::vector<float>& logits : micro_batches) {
    const auto tokens = static_cast<double>(logits.size()) / kExperts;
    double chosen[kExperts] = {}, probability[kExperts] = {}, squares = 0;
    for (auto row = logits.begin(); row != logits.end(); row += kExperts) {
      int order[kExperts] = {0, 1, 2, 3};
      std::sort(order, order + kExperts, [&](int a, int b) { return row[a] > row[b]; });
      for (int k = 0; k < kChoices; ++k) chosen[order[k]] += 1;
      double sum = 0;
      for (int e = 0; e < kExperts; ++e) sum += std::exp(static_cast<double>(row[e]));
      for (int e = 0; e < kExperts; ++e) probability[e] += std::exp(static_cast<double>(row[e])) / sum;
      squares += std::pow(std::log(sum), 2);
    }
    for (size_t e = 0; e < kExperts; ++e) {
      sums[e] += chosen[e];
      sums[kExperts] += kBalance * kExperts * chosen[e] / (tokens * kChoices) * probability[e] / tokens;
    }
    sums[kExperts + 1] += kZ * squares / tokens;
  }
  return sums;
}

}  // namespace

TEST_CASE("loads and losses of the routers are those of all tokens of the step, by the formulas of papers") {
  for (const auto device : {config::DeviceKind::cpu, config::DeviceKind::checked}) {
    config::Config config = router_config();
    config.train.device = device;
    Running r(config);
    for (int step = 0; step < 2; ++step) {
      Logits logits;
      r.runner.observe(&logits);
      const StepResult result = r.step();
      r.runner.observe(nullptr);
      REQUIRE(result.routers.size() == 3);
      for (const RouterResult& router : result.routers) {
        CAPTURE(router.layer);
        std::vector<double> sums = sums_of(logits.of_layer.at(router.layer));
        comm::all_reduce(world().communicator(), sums, comm::ReduceOp::sum);
        for (size_t e = 0; e < kExperts; ++e)
          CHECK(router.load.at(e) == sums[e] / static_cast<double>(8 * config.model.seq_length * kChoices));
        // Eight micro-batches.
        CHECK(router.balance_loss == doctest::Approx(sums[kExperts] / 8).epsilon(1e-5));
        CHECK(router.z_loss == doctest::Approx(sums[kExperts + 1] / 8).epsilon(1e-5));
      }
    }
  }
}

// As many choices as an expert has beyond its capacity, in the tokens of each rank and micro-batch.
TEST_CASE("the choices that a step dropped are those beyond the capacity of experts") {
  config::Config capacity = router_config();
  capacity.model.moe_expert_capacity_factor = 0.7;
  std::vector<config::Config> configs(2, capacity);
  configs[1].model.moe_pad_expert_input_to_capacity = true;
  if (const int size = world().size(); size > 1) {
    configs.resize(5, capacity);
    configs[2].dist.tensor_model_parallel_size = 2, configs[2].dist.sequence_parallel = true;
    configs[2].dist.data_parallel_size = size / 2;
    configs[3].dist.context_parallel_size = 2, configs[3].dist.data_parallel_size = size / 2;
    configs[4].dist.expert_model_parallel_size = 2, configs[4].dist.expert_data_parallel_size = size / 2;
  }
  for (const config::Config& config : configs) {
    CAPTURE(&config - configs.data());
    Running r(config);
    Logits logits;
    r.runner.observe(&logits);
    const StepResult result = r.step();
    r.runner.observe(nullptr);
    for (const RouterResult& router : result.routers) {
      CAPTURE(router.layer);
      std::vector<double> dropped{0};
      for (const std::vector<float>& of_rank : logits.of_layer.at(router.layer)) {
        const double equal_load = static_cast<double>(of_rank.size() / kExperts * kChoices) / kExperts;
        const std::vector<double> sums = sums_of({of_rank});
        for (size_t e = 0; e < kExperts; ++e)
          dropped[0] += std::max(0.0, sums[e] - std::ceil(equal_load * 0.7));
      }
      comm::all_reduce(world().communicator(), dropped, comm::ReduceOp::sum);
      CHECK(dropped[0] > 0);
      CHECK(router.choices == static_cast<double>(8 * config.model.seq_length * kChoices));
      REQUIRE(router.dropped);
      CHECK(*router.dropped == dropped[0]);
    }
  }
  CHECK_FALSE(Running(router_config()).step().routers[0].dropped);
}

// Ranks of experts that are sharded in width drop from the tokens of all of them, which are those of one rank
// without tensor parallelism.
TEST_CASE("layouts that dispatch the same tokens together drop the same choices") {
  const int size = world().size();
  if (size == 1) return;
  config::Config single = router_config();
  single.model.moe_expert_capacity_factor = 0.7;
  const std::vector<RouterResult> expected = Running(single).step().routers;
  std::vector<config::Config> configs(4, single);
  configs[0].dist.expert_model_parallel_size = 2, configs[0].dist.expert_data_parallel_size = size / 2;
  for (config::Config* pipeline : {&configs[1], &configs[2]}) {
    pipeline->dist.pipeline_model_parallel_size = 2;
    pipeline->dist.data_parallel_size = pipeline->dist.expert_data_parallel_size = size / 2;
  }
  configs[2].model.recompute_granularity = config::RecomputeGranularity::full;
  configs[2].model.recompute_num_layers = 1;
  configs[3].dist.tensor_model_parallel_size = 2, configs[3].dist.expert_tensor_parallel_size = 2;
  configs[3].dist.sequence_parallel = true;
  configs[3].dist.data_parallel_size = configs[3].dist.expert_data_parallel_size = size / 2;
  for (const config::Config& config : configs) {
    CAPTURE(&config - configs.data());
    const std::vector<RouterResult> routers = Running(config).step().routers;
    REQUIRE(routers.size() == expected.size());
    for (size_t i = 0; i < routers.size(); ++i) {
      CHECK(routers[i].choices == expected[i].choices);
      CHECK(*expected[i].dropped > 0);
      CHECK(routers[i].dropped == expected[i].dropped);
    }
  }
}

TEST_CASE("every layout reports the same loads and losses of the routers") {
  const int size = world().size();
  if (size == 1) return;
  const auto first_step = [](const config::Config& config) { return Running(config).step().routers; };
  const std::vector<RouterResult> expected = first_step(router_config());
  std::vector<config::Config> configs(3, router_config());
  configs[0].dist.tensor_model_parallel_size = 2, configs[0].dist.sequence_parallel = true;
  configs[0].dist.data_parallel_size = size / 2;
  configs[1].dist.pipeline_model_parallel_size = 2;
  configs[1].dist.data_parallel_size = configs[1].dist.expert_data_parallel_size = size / 2;
  configs[2].dist.expert_model_parallel_size = 2, configs[2].dist.expert_data_parallel_size = size / 2;
  for (const config::Config& config : configs) {
    CAPTURE(&config - configs.data());
    const std::vector<RouterResult> routers = first_step(config);
    REQUIRE(routers.size() == expected.size());
    for (size_t i = 0; i < routers.size(); ++i) {
      CHECK(routers[i].layer == expected[i].layer);
      CHECK(routers[i].load == expected[i].load);
      CHECK(routers[i].balance_loss == doctest::Approx(expected[i].balance_loss).epsilon(1e-5));
      CHECK(routers[i].z_loss == doctest::Approx(expected[i].z_loss).epsilon(1e-5));
    }
  }
}

namespace {

// Rows of 16 tokens, alone or followed by padding of `padding` positions, as fine-tuning data has them.
class Samples final : public data::Dataset {
 public:
  static constexpr int64_t kTokens = 16;
  explicit Samples(int64_t padding) : padding_(padding) {}
  int64_t sequence_length() const override { return kTokens + padding_; }
  int64_t samples() const override { return data::SampleSource::kEndless; }
  int64_t epoch_samples() const override { return 64; }
  void row(int64_t number, const data::RowView& out) const override {
    PhiloxSequence random(philox_key(3, purpose::test, static_cast<uint64_t>(number)));
    std::vector<int32_t> text(static_cast<size_t>(sequence_length() + 1), 7);
    for (size_t i = 0; i <= kTokens; ++i) text[i] = static_cast<int32_t>(random.below(61));
    data::fill_row(text, {}, out);
    std::fill(out.loss_mask.begin() + kTokens, out.loss_mask.end(), 0.0f);
    if (padding_ == 0) return;
    *out.cu_seqlens = {0, kTokens, static_cast<int32_t>(sequence_length())};
    *out.length = kTokens;
  }
  std::string fingerprint() const override { return "samples"; }

 private:
  int64_t padding_;
};

StepResult second_step(config::Config config, int64_t padding) {
  config.model.seq_length = Samples::kTokens + padding;
  Running r(config);
  r.loader = std::make_unique<data::Loader>(std::make_shared<Samples>(padding), r.runner.loader_options());
  (void)r.step();
  return r.step();
}

}  // namespace

// The same samples with padding behind them and without.
TEST_CASE("padding changes no load and no loss of the routers, on any layout") {
  using config::RouterBalancing;
  const int size = world().size();
  config::Config two_losses = router_config(), of_global_batch = router_config(), biased = router_config();
  two_losses.train.micro_batch_size = 2;
  two_losses.model.moe_router_load_balancing_type =
      config::OneOrMore(std::vector{RouterBalancing::aux_loss, RouterBalancing::seq_aux_loss});
  two_losses.model.moe_aux_loss_coeff = config::OneOrMore(std::vector{kBalance, 2 * kBalance});
  of_global_batch.model.moe_router_load_balancing_type = RouterBalancing::global_aux_loss;
  biased.model.moe_router_score_function = config::RouterScore::sigmoid;
  biased.model.moe_router_enable_expert_bias = true;
  for (const config::Config& of_data : {two_losses, of_global_batch, biased}) {
    const StepResult expected = second_step(of_data, 0);
    std::vector<config::Config> layouts = {of_data};
    if (size > 1) {
      layouts.resize(5, of_data);
      layouts[1].dist.tensor_model_parallel_size = 2, layouts[1].dist.sequence_parallel = true;
      layouts[1].dist.data_parallel_size = size / 2;
      layouts[2].dist.context_parallel_size = 2, layouts[2].dist.data_parallel_size = size / 2;
      layouts[3].dist.expert_model_parallel_size = 2, layouts[3].dist.expert_data_parallel_size = size / 2;
      layouts[4].dist.pipeline_model_parallel_size = 2;
      layouts[4].dist.data_parallel_size = layouts[4].dist.expert_data_parallel_size = size / 2;
    }
    for (const config::Config& layout : layouts) {
      CAPTURE(&layout - layouts.data());
      // The load of the global batch so far depends on how many micro-batches are computed together.
      if (of_data.model.moe_router_load_balancing_type == RouterBalancing::global_aux_loss &&
          layout.dist.data_parallel_size != size)
        continue;
      const StepResult padded = second_step(layout, 8);
      CHECK(padded.loss == doctest::Approx(expected.loss).epsilon(1e-5));
      CHECK(padded.gradient_norm == doctest::Approx(expected.gradient_norm).epsilon(1e-5));
      REQUIRE(padded.routers.size() == expected.routers.size());
      for (size_t i = 0; i < expected.routers.size(); ++i) {
        CHECK(padded.routers[i].load == expected.routers[i].load);
        CHECK(padded.routers[i].balance_loss ==
              doctest::Approx(expected.routers[i].balance_loss).epsilon(1e-5));
        CHECK(padded.routers[i].z_loss == doctest::Approx(expected.routers[i].z_loss).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("metrics.jsonl has the loads of every layer, the highest one, and the losses summed over layers") {
  config::Config config = router_config();
  constexpr int kSteps = 6;
  using config::RouterBalancing;
  config.model.moe_router_load_balancing_type =
      config::OneOrMore(std::vector{RouterBalancing::aux_loss, RouterBalancing::seq_aux_loss});
  config.model.moe_aux_loss_coeff = config::OneOrMore(std::vector{kBalance, 5 * kBalance});
  config.train.train_iters = kSteps;
  config.model.moe_expert_capacity_factor = 0.7;
  config.logger.log_interval = 1;
  config.validation.eval_interval.reset();
  const test::SharedDirectory root;
  RunOptions options;
  options.run_dir = root.path() / "run";
  options.recipe = {"tiny", "name: tiny\n", "name: tiny\n", "0", "capstan train tiny"};
  options.measure_rate = false;
  capstan::testing::Report report;
  train::train(config, world(), options, report);
  Running r(config);
  std::vector<StepResult> steps;
  for (int step = 0; step < kSteps; ++step) steps.push_back(r.step());
  if (world().rank() > 0) return;
  std::ifstream file(options.run_dir / "metrics.jsonl");
  size_t step = 0;
  for (std::string line; std::getline(file, line);) {
    const Json row = json_of(line);
    if (row.contains("event")) continue;
    REQUIRE(step < steps.size());
    const StepResult& result = steps[step++];
    CHECK(row["loss"].get<double>() == result.loss);
    double balance = 0, z = 0, highest = 0, parts[2] = {}, choices = 0, dropped = 0;
    for (const RouterResult& router : result.routers) {
      balance += router.balance_loss, z += router.z_loss;
      REQUIRE(router.balance_losses.size() == 2);
      for (size_t i = 0; i < 2; ++i) parts[i] += router.balance_losses[i].second;
      for (const double load : router.load) highest = std::max(highest, load * kExperts);
      CHECK(row["expert_load_layer_" + std::to_string(router.layer)].get<std::vector<double>>() ==
            router.load);
      choices += router.choices, dropped += router.dropped.value();
      CHECK(row["expert_dropped_layer_" + std::to_string(router.layer)].get<double>() ==
            *router.dropped / router.choices);
    }
    CHECK(row["expert_dropped"].get<double>() == dropped / choices);
    CHECK(dropped > 0);
    CHECK(row["balance_loss"].get<double>() == balance);
    CHECK(row["aux_loss"].get<double>() == parts[0]);
    CHECK(row["seq_aux_loss"].get<double>() == parts[1]);
    // A micro-batch is one sequence: only the coefficients differ.
    CHECK(parts[1] == doctest::Approx(5 * parts[0]).epsilon(1e-5));
    CHECK(row["z_loss"].get<double>() == z);
    CHECK(row["expert_max_load"].get<double>() == highest);
  }
  CHECK(step == kSteps);
  std::string events;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(options.run_dir))
    if (entry.path().filename().string().starts_with("events.")) events += read_file(entry.path());
  for (const RouterResult& router : steps.back().routers) {
    const std::string layer = "_layer_" + std::to_string(router.layer);
    CHECK(events.find("train/expert_max_load" + layer) != std::string::npos);
    CHECK(events.find("train/expert_load" + layer) != std::string::npos);
    CHECK(events.find("train/expert_dropped" + layer) != std::string::npos);
    for (int64_t expert = 0; expert < kExperts; ++expert)
      CHECK(events.find("experts/load" + layer + "_expert_" + std::to_string(expert)) != std::string::npos);
  }
}
