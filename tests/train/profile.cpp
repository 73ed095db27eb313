// Memory estimated and measured, what fits, the table of operations and the trace.
#include "train/trainer/profile.hpp"
#include "base/json.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "config/resolve/resolve.hpp"
#include "kernels/table.hpp"
#include "models/registry.hpp"
#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/sanitized.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/setup/cuda.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/smaller_steps.hpp"
#include "train/trainer/step_logger.hpp"
#include "train/trainer/step_runner.hpp"
#include "train/trainer/stop.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::testing::tiny_config;
using capstan::testing::tiny_experts_config;

namespace {

using test::world;

void steps(StepRunner& runner, const config::Config& config, int64_t count, StepTimers& timers) {
  const auto data = open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  for (int64_t i = 0; i < count; ++i) {
    timers.start_step();
    runner.train_step(loader, timers);
    timers.step_seconds();
  }
}

struct LowPrecisionVariant {
  const char* name;
  void (*choose)(config::MixedPrecisionConfig&);
};
template <config::Fp8Recipe kRecipe>
void choose_fp8(config::MixedPrecisionConfig& precision) {
  precision.params_dtype = config::Precision::bf16;
  precision.fp8 = config::Fp8Format::hybrid, precision.fp8_recipe = kRecipe;
}
constexpr LowPrecisionVariant kLowPrecision[] = {{"delayed", choose_fp8<config::Fp8Recipe::delayed>},
                                                 {"tensorwise", choose_fp8<config::Fp8Recipe::tensorwise>},
                                                 {"blockwise", choose_fp8<config::Fp8Recipe::blockwise>},
                                                 {"mxfp8", choose_fp8<config::Fp8Recipe::mxfp8>},
                                                 {"nvfp4", [](config::MixedPrecisionConfig& precision) {
                                                    precision.params_dtype = config::Precision::bf16,
                                                    precision.fp4 = config::Fp4Format::e2m1;
                                                  }}};

// The variants whose memory differs.
std::vector<config::Config> variants() {
  std::vector<config::Config> list;
  for (const bool llama : {false, true})
    for (const auto precision : {config::Precision::fp32, config::Precision::bf16, config::Precision::fp16})
      for (int mode = 0; mode < 5; ++mode) {
        config::Config c = tiny_config(llama);
        c.model.num_layers = 5, c.model.seq_length = 40, c.model.max_position_embeddings = 40;
        c.mixed_precision.params_dtype = precision;
        c.train.threads = 1 + mode;  // each has a part of the workspace
        if (mode == 1) {
          c.model.recompute_granularity = config::RecomputeGranularity::selective;
          c.model.recompute_modules = {config::RecomputeModule::core_attn};
        } else if (mode == 2) {
          c.model.recompute_granularity = config::RecomputeGranularity::selective;
          c.model.recompute_modules = {config::RecomputeModule::core_attn, config::RecomputeModule::mlp};
        } else if (mode > 2) {
          c.model.recompute_granularity = config::RecomputeGranularity::full;
          c.model.recompute_method =
              mode == 3 ? config::RecomputeMethod::uniform : config::RecomputeMethod::block;
          c.model.recompute_num_layers = 2;
        }
        list.push_back(c);
      }
  for (const auto& [name, choose] : kLowPrecision) {
    config::Config c = tiny_config(true);
    choose(c.mixed_precision);
    list.push_back(c);
  }
  list.push_back(tiny_experts_config());
  // The last index is a multiple of 4: on the checked device too.
  list.push_back(tiny_experts_config());
  config::Config& c = list.back();
  c.mixed_precision.params_dtype = config::Precision::bf16;
  c.model.recompute_granularity = config::RecomputeGranularity::selective;
  c.model.recompute_modules = {config::RecomputeModule::moe};
  return list;
}

std::filesystem::path scratch_file(const std::string& name) {
  return std::filesystem::temp_directory_path() / ("capstan-" + std::to_string(::getpid()) + "-" + name);
}

}  // namespace

static void check_memory(const config::Config& config) {
  const MemoryUse estimated = estimate_step(config).memory;
  StepRunner runner(config, world());
  runner.initialize();
  StepTimers timers;
  steps(runner, config, 2, timers);
  const MemoryUse measured = runner.device().memory();
  const int64_t host_requests = runner.device().host_memory().system_requests;
  CAPTURE(memory_text(estimated));
  CAPTURE(memory_text(measured));
  CHECK(std::abs(static_cast<double>(estimated.peak - measured.peak)) <=
        0.02 * static_cast<double>(measured.peak));
  for (const auto owner :
       {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::main_parameters,
        MemoryCategory::moments, MemoryCategory::activations}) {
    const auto i = static_cast<size_t>(owner);
    CHECK(estimated.peak_by_category[i] == doctest::Approx(measured.peak_by_category[i]).epsilon(0.02));
  }
  CHECK(estimated.reserved == doctest::Approx(measured.reserved).epsilon(0.02));
  steps(runner, config, 2, timers);
  CHECK(runner.device().memory().system_requests == measured.system_requests);
  CHECK(runner.device().host_memory().system_requests == host_requests);
}

TEST_CASE_TEMPLATE(
    "the peak of a step is estimated by category within 2 %, and the system is not asked again", D,
    EVERY_DEVICE) {
  const std::vector<config::Config> all = variants();
  // On the checked device every precision and every kind of recomputation, and experts; few in a simulation.
  const size_t every = D::kSlow ? 12 : D::type == DeviceType::checked ? 4 : 1;
  REQUIRE((all.size() - 1) % every == 0);
  for (size_t i = 0; i < all.size(); i += every) {
    CAPTURE(i);
    config::Config config = all[i];
    if (!test::multiplies<D>(config.mixed_precision)) continue;
    config.train.device = test::device_kind(D::type);
    check_memory(config);
  }
}

// Published by Megatron-Bridge for sequences of 4096 tokens: 249.7 GFLOP a token without the layer for
// multi-token prediction, 260.0 with it. The estimate counts routers too.
TEST_CASE("the FLOPs of DeepSeek-V3 with multi-token prediction are the published ones") {
  const auto gflops_of = [](const char* layers) {
    config::Request request;
    request.recipe = "quickstart";
    request.unset = {"model"};
    for (const char* text :
         {"model=deepseek-v3", layers, "model.seq_length=4096", "mixed_precision=bf16_mixed",
          "train.micro_batch_size=1", "train.global_batch_size=1"})
      request.overrides.push_back(config::Override::token(text));
    const config::Resolution resolution = config::resolve(request);
    REQUIRE_MESSAGE(resolution.ok(), config::render(resolution.diagnostics, resolution.sources));
    return estimate_step(resolution.config).flops / 4096 / 1e9;
  };
  const double without = gflops_of("model.mtp_num_layers=null"), with = gflops_of("model.mtp_num_layers=1");
  MESSAGE(without << " and " << with << " GFLOP a token");
  CHECK(without == doctest::Approx(249.7).epsilon(0.005));
  CHECK(with == doctest::Approx(260.0).epsilon(0.005));
  CHECK(with - without == doctest::Approx(260.0 - 249.7).epsilon(0.02));
}

TEST_CASE("the memory of an 8B step is estimated in a moment") {
  config::Request request;
  request.recipe = "llama3-8b";
  for (const char* text : {"dist.context_parallel_size=1", "dist.world_size=1", "train.global_batch_size=1"})
    request.overrides.push_back(config::Override::token(text));
  const config::Resolution resolution = config::resolve(request);
  REQUIRE(resolution.ok());
  const auto start = std::chrono::steady_clock::now();
  const StepEstimate estimate = estimate_step(resolution.config);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // bf16 weights, fp32 main parameters, gradients and two moments: 18 bytes a parameter, and activations
  // beside them.
  CHECK(estimate.memory.peak > int64_t{18} * 8'030'000'000);
  CHECK(estimate.flops > 6.0 * 8.0e9 * 8192);
  MESSAGE("estimated in " << 1e3 * seconds << " ms: " << memory_text(estimate.memory));
#if CAPSTAN_TIMED
  CHECK(seconds < 0.1);
#endif
}

TEST_CASE("8B parameters with 16-bit moments take 14 bytes each, and a step fits one H200") {
  const auto estimated = [](const std::vector<std::string>& overrides) {
    config::Request request;
    request.recipe = "llama3-8b";
    for (const char* text : {"dist.context_parallel_size=1", "dist.world_size=1", "train.global_batch_size=2",
                             "train.device=cuda", "model.cpu_offloading=true",
                             "model.cpu_offloading_num_layers=31", "model.recompute_granularity=full",
                             "model.recompute_method=uniform", "model.recompute_num_layers=1",
                             "optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16",
                             "optimizer.exp_avg_sq_dtype=bf16", "optimizer.stochastic_rounding=true"})
      request.overrides.push_back(config::Override::token(text));
    for (const std::string& text : overrides) request.overrides.push_back(config::Override::token(text));
    const config::Resolution resolution = config::resolve(request);
    REQUIRE(resolution.ok());
    REQUIRE(resolution.config.mixed_precision.params_dtype == config::Precision::bf16);
    return estimate_step(resolution.config);
  };
  constexpr int64_t kParameters = 8'030'261'248;
  const auto state_bytes = [](const StepEstimate& estimate) {
    int64_t bytes = 0;
    for (const auto category : {MemoryCategory::parameters, MemoryCategory::gradients,
                                MemoryCategory::main_parameters, MemoryCategory::moments})
      bytes += estimate.memory.peak_by_category[static_cast<size_t>(category)];
    return bytes;
  };
  const StepEstimate estimate = estimated({});
  MESSAGE(memory_text(estimate.memory));
  CHECK(state_bytes(estimate) <= 14 * kParameters);
  // bf16 parameters, fp32 gradients.
  CHECK(estimate.memory.peak_by_category[size_t(MemoryCategory::parameters)] == 2 * kParameters);
  CHECK(estimate.memory.peak_by_category[size_t(MemoryCategory::gradients)] == 4 * kParameters);
  // configs/cluster/h200.yaml: usable_memory.
  CHECK(estimate.memory.total() < int64_t{137} << 30);
  CHECK(state_bytes(estimated({"optimizer.main_params_dtype=bf16"})) <= 10 * kParameters);
  // Gradients in bf16, and in fp32 those of the bucket whose weight gradients are computed: at most that of
  // the embedding or the head, which a part of a layer precedes.
  const StepEstimate narrow = estimated({"optimizer.main_grads_dtype=bf16"});
  MESSAGE(memory_text(narrow.memory));
  const int64_t gradients = narrow.memory.peak_by_category[size_t(MemoryCategory::gradients)];
  constexpr int64_t kEmbedding = 128256 * 4096, kMaxBucket = kEmbedding + 40'000'000;
  CHECK(gradients >= 2 * kParameters + 4 * kEmbedding);
  CHECK(gradients <= 2 * kParameters + 4 * kMaxBucket);
  CHECK(state_bytes(narrow) <= 12 * kParameters + 4 * kMaxBucket);
  CHECK(state_bytes(estimated({"optimizer.main_grads_dtype=bf16", "optimizer.main_params_dtype=bf16"})) <=
        8 * kParameters + 4 * kMaxBucket);
}

TEST_CASE("a step that does not fit is refused with overrides that do") {
  config::Config config = tiny_config(true);
  config.model.num_layers = 5;
  config.train.micro_batch_size = 4, config.train.global_batch_size = 4;
  const StepEstimate estimate = estimate_step(config);
  config.resilience.memory_limit = config::Bytes{estimate.memory.total()};
  CHECK_NOTHROW(check_fits(config, estimate, 0, 1));
  config.resilience.memory_limit = config::Bytes{estimate.memory.total() - 1};
  try {
    check_fits(config, estimate, 0, 1);
    FAIL("must not fit");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::no_fit);
    CHECK(error.message().find("activations") != std::string::npos);
    CHECK(error.help().find("train.micro_batch_size=2 train.global_batch_size=4 (") != std::string::npos);
    CHECK(error.help().find("model.recompute_granularity=selective 'model.recompute_modules=[mlp]' (") !=
          std::string::npos);
    CHECK(error.help().find("ddp.sharding") == std::string::npos);
  }
  // The proposed values fit.
  config.train.micro_batch_size = 2;
  CHECK(estimate_step(config).memory.peak < estimate.memory.peak);
  config.resilience.memory_limit = config::Bytes{1000};
  CHECK_THROWS_WITH_AS(check_fits(config, estimate, 0, 1), doctest::Contains("choose a smaller model"),
                       Error);
  config.resilience.memory_limit.reset();
  CHECK_NOTHROW(check_fits(config, estimate, 0, 1));
}

namespace {

// The overrides of a step that fits within so many bytes, as the search finds them first.
std::string first_fit(const config::Config& config, int64_t bytes) {
  const SmallerSteps found = find_smaller_steps(config, [&](const config::Config& asked) {
    const int64_t needed = estimate_step(asked).memory.total();
    return StepNeed{needed, needed <= bytes};
  });
  return found.fitting.empty() ? "none: " + join(found.smallest.overrides, " ")
                               : join(found.fitting.front().overrides, " ");
}

}  // namespace

TEST_CASE("smaller steps: one change where one is enough, else the fewest, of those that delay least") {
  config::Config config = tiny_config(true, 2);
  config.model.num_layers = 5;
  config.train.device = config::DeviceKind::checked;
  config.train.micro_batch_size = 4, config.train.global_batch_size = 8;
  const auto bytes_of = [](const config::Config& asked) { return estimate_step(asked).memory.total(); };
  const int64_t given = bytes_of(config);
  config::Config sharded = config, halved = config;
  sharded.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim;
  halved.train.micro_batch_size = 2;
  CHECK(first_fit(config, given - 1) == "ddp.sharding=optim");
  REQUIRE(bytes_of(halved) < bytes_of(sharded));
  CHECK(first_fit(config, bytes_of(halved)) == "train.micro_batch_size=2 train.global_batch_size=8");
  const std::string all =
      "ddp.sharding=optim_grads_params train.micro_batch_size=1 train.global_batch_size=8 "
      "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1 "
      "model.cpu_offloading=true model.cpu_offloading_num_layers=4 optimizer.optimizer_cpu_offload=true";
  // Of a step for which nothing is enough, the offload is left out: the host's memory would be missing next.
  CHECK(first_fit(config, 1) == "none: " + all.substr(0, all.find(" model.cpu_offloading=")));
  // Muon's updates are not element-wise, so that its state is not offloaded.
  const auto least = [&](bool offloads_state) {
    config::Config smallest = config;
    smallest.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads_params;
    smallest.train.micro_batch_size = 1;
    smallest.model.recompute_granularity = config::RecomputeGranularity::full;
    smallest.model.recompute_method = config::RecomputeMethod::uniform;
    smallest.model.recompute_num_layers = 1;
    smallest.model.cpu_offloading = true, smallest.model.cpu_offloading_num_layers = 4;
    smallest.optimizer.optimizer_cpu_offload = offloads_state;
    return bytes_of(smallest);
  };
  REQUIRE(least(true) < least(false));
  const std::string fewest = first_fit(config, least(true));
  CHECK_MESSAGE(fewest.ends_with(" optimizer.optimizer_cpu_offload=true"), fewest);
  // A recipe of one rank with experts has no other ranks to shard over, and its module is moe.
  config::Config experts = tiny_experts_config();
  CHECK(first_fit(experts, bytes_of(experts) - 1) == "train.micro_batch_size=1 train.global_batch_size=4");
  experts.train.micro_batch_size = 1;
  CHECK(first_fit(experts, bytes_of(experts) - 1) ==
        "model.recompute_granularity=selective model.recompute_modules=[moe]");
}

TEST_CASE("device and host have a limit each, and one memory on the CPU") {
  config::Config config = tiny_config(true);
  config.checkpoint.async_save = true, config.checkpoint.save_interval = 2;
  const auto refusal = [&] {
    try {
      check_fits(config, estimate_step(config), 0, 1);
      return std::string();
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::no_fit);
      return error.message();
    }
  };
  const int64_t shared = estimate_step(config).memory.total();
  CHECK(estimate_step(config).host_memory.total() == 0);
  config.train.device = config::DeviceKind::checked;
  const StepEstimate apart = estimate_step(config);
  const int64_t device = apart.memory.total(), host = apart.host_memory.total();
  CHECK(host > 0);
  const auto part = [&](MemoryCategory category) {
    return apart.host_memory.peak_by_category[static_cast<size_t>(category)];
  };
  CHECK(part(MemoryCategory::snapshot) > 0);
  CHECK(part(MemoryCategory::snapshot) + part(MemoryCategory::data) == host);
  CHECK(device < shared);

  config.resilience.memory_limit = config::Bytes{device};
  config.resilience.memory_limit_host = config::Bytes{host};
  CHECK(refusal().empty());
  config.resilience.memory_limit_host = config::Bytes{host - 1};
  CHECK(refusal().find(" of host memory (") != std::string::npos);
  CHECK(refusal().find("resilience.memory_limit_host allows") != std::string::npos);
  config.resilience.memory_limit = config::Bytes{device - 1};
  CHECK(refusal().find("resilience.memory_limit allows") != std::string::npos);

  config.train.device = config::DeviceKind::cpu;
  config.resilience.memory_limit = config::Bytes{shared};
  config.resilience.memory_limit_host = config::Bytes{shared};
  CHECK(refusal().empty());
  config.resilience.memory_limit_host = config::Bytes{shared - 1};
  CHECK(refusal().find("resilience.memory_limit_host allows") != std::string::npos);
  // A GPU's memory is known where there is one.
  config.train.device = config::DeviceKind::cuda;
  config.resilience.memory_limit.reset(), config.resilience.memory_limit_host.reset();
  CHECK(memory_limit(config, MemoryKind::device, 1).has_value() == (cuda_status().usable != nullptr));
  CHECK(memory_limit(config, MemoryKind::host, 1));
  CHECK(refusal().empty());
}

TEST_CASE("operations add up to the step's FLOPs") {
  const config::Config config = tiny_config(true);
  StepRunner runner(config, world());
  runner.initialize();
  StepTimers timers;
  OperationTable table;
  runner.observe(&table);
  steps(runner, config, 1, timers);
  double flops = 0, seconds = 0;
  for (const auto& row : table.by_time()) {
    flops += row.cost.flops, seconds += row.seconds;
    CHECK_MESSAGE(row.seconds > 0, row.name, " ", row.phase);
  }
  const double expected = estimate_step(config).flops * static_cast<double>(runner.micro_batches());
  CHECK(flops == doctest::Approx(expected));
  const double passes = timers.seconds(Phase::forward) + timers.seconds(Phase::backward);
  CHECK(seconds > 0.5 * passes);
  CHECK(seconds < 1.01 * passes);
  for (config::Config again : variants()) {  // what recomputation adds is not what the step needs
    const double needed = estimate_step(again).flops;
    again.model.recompute_granularity.reset();
    CHECK(needed == doctest::Approx(estimate_step(again).flops));
  }
}

// The trace of one step, and a check of what every trace holds.
static void check_trace(config::DeviceKind device) {
  CAPTURE(static_cast<int>(device));
  config::Config config = tiny_config(true);
  config.train.device = device;
  StepRunner runner(config, world());
  runner.initialize();
  StepTimers timers;
  const double expected = estimate_step(config).flops * static_cast<double>(runner.micro_batches());
  Trace trace(3, true);
  trace.step(2);
  runner.observe(&trace);
  timers.listen([&](Phase phase, double end, double length) { trace.phase(phase, end, length); });
  steps(runner, config, 1, timers);
  const auto file = scratch_file("trace.json");
  trace.write(file);
  const auto json = capstan::json_of(read_file(file));
  std::filesystem::remove(file);
  // The end of the last event of each lane, in which events do not overlap.
  std::map<int, double> ends;
  double traced = 0;
  size_t count = 0;
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] != "X") continue;
    ++count;
    CHECK(event["pid"] == 3);
    CHECK(event["args"]["step"] == 2);
    double& end = ends[event["tid"].get<int>()];
    CHECK(event["ts"].get<double>() >= end - 0.01);
    CHECK(event["dur"].get<double>() >= 0);
    end = event["ts"].get<double>() + event["dur"].get<double>();
    traced += event["args"].value("flops", 0.0);
    if (event["name"] == "linear") CHECK(event["args"].contains("shapes"));
  }
  CHECK(count == trace.events());
  // Phases, operations and their parts, and the copies of micro-batches to the device.
  CHECK(ends.size() == 5);
  CHECK(traced == doctest::Approx(expected));
  CHECK_THROWS_AS(trace.write("/proc/no/such/place.json"), Error);
  runner.observe(nullptr);
}

TEST_CASE(
    "the trace holds the step's FLOPs in order, by the host's clock or by events of the compute queue") {
  for (const auto device :
       {config::DeviceKind::cpu, config::DeviceKind::checked, config::DeviceKind::simulated})
    check_trace(device);
}

namespace {

// The launches of a step after the first, which the estimate knows as well as the copied bytes.
int64_t launches_of_step(config::Config config, int64_t layers, int64_t micro_batches) {
  config.model.num_layers = layers;
  config.train.micro_batch_size = 1;
  config.train.global_batch_size = micro_batches;
  StepRunner runner(config, world());
  runner.initialize();
  StepTimers timers;
  steps(runner, config, 1, timers);
  const Device& device = runner.device();
  const int64_t before = device.launches();
  const int64_t copied_before = device.copied_bytes(Queue::host_to_device),
                read_before = device.copied_bytes(Queue::device_to_host);
  steps(runner, config, 1, timers);
  const int64_t step = device.launches() - before;
  const StepEstimate estimate = estimate_step(config);
  CHECK(estimate.launches() == step);
  CHECK(estimate.launches_by_queue[static_cast<size_t>(Queue::compute)] == step);
  CHECK(estimate.copied_to_device == device.copied_bytes(Queue::host_to_device) - copied_before);
  CHECK(estimate.copied_to_host == device.copied_bytes(Queue::device_to_host) - read_before);
  return step;
}

struct LayerLaunches {
  // In the forward and backward pass of a micro-batch, and in a step besides.
  int64_t of_micro_batch, of_step;
};
LayerLaunches launches_of_layer(const config::Config& config) {
  const auto of_layer = [&](int64_t micro_batches) {
    return launches_of_step(config, 3, micro_batches) - launches_of_step(config, 2, micro_batches);
  };
  const int64_t once = of_layer(1), of_micro_batch = of_layer(2) - once;
  return {of_micro_batch, once - of_micro_batch};
}

}  // namespace

TEST_CASE("the launches of a step are counted: those of a layer, and an update of one for each buffer") {
  // docs/performance.md has these numbers.
  struct Kind {
    bool llama, qk_norm;
    LayerLaunches launches;
  };
  for (const auto precision : {config::Precision::fp32, config::Precision::bf16})
    for (const auto& [llama, qk_norm, expected] :
         {Kind{false, false, {30, 8}}, {true, false, {24, 2}}, {true, true, {27, 4}}}) {
      config::Config config = tiny_config(llama);
      config.model.qk_layernorm = qk_norm;
      config.mixed_precision.params_dtype = precision;
      CAPTURE(expected.of_micro_batch);
      const LayerLaunches counted = launches_of_layer(config);
      CHECK(counted.of_micro_batch == expected.of_micro_batch);
      CHECK(counted.of_step == expected.of_step);
      const int64_t once = launches_of_step(config, 2, 1), twice = launches_of_step(config, 2, 2),
                    more = launches_of_step(config, 2, 7);
      CHECK(more - twice == 5 * (twice - once));
    }
}

TEST_CASE("the launches of a layer are counted: with experts, and with latent attention") {
  // docs/performance.md has these numbers. In bf16 the backward pass of the router converts its weight, its
  // input and the gradient of its input.
  for (const auto precision : {config::Precision::fp32, config::Precision::bf16}) {
    CAPTURE(static_cast<int>(precision));
    config::Config experts = tiny_experts_config(), latent = tiny_config(true);
    auto& m = latent.model;
    m.multi_latent_attention = m.qk_layernorm = true;
    m.num_query_groups = m.num_attention_heads;
    m.q_lora_rank = 16, m.kv_lora_rank = 12, m.qk_head_dim = 8, m.qk_pos_emb_head_dim = 4, m.v_head_dim = 8;
    m.kv_channels = m.qk_head_dim + m.qk_pos_emb_head_dim;
    m.latent_layernorm_epsilon = m.layernorm_epsilon;
    experts.mixed_precision.params_dtype = latent.mixed_precision.params_dtype = precision;
    const LayerLaunches of_experts = launches_of_layer(experts), of_latent = launches_of_layer(latent);
    CHECK(of_experts.of_micro_batch == (precision == config::Precision::fp32 ? 56 : 59));
    CHECK(of_experts.of_step == 5);
    CHECK(of_latent.of_micro_batch == 51);
    CHECK(of_latent.of_step == 4);
  }
}

TEST_CASE(
    "the launches of a step on the checked device are those on the CPU; with CUDA kernels, the estimated "
    "ones") {
  for (const bool llama : {false, true})
    for (const auto precision : {config::Precision::fp32, config::Precision::bf16}) {
      config::Config config = tiny_config(llama);
      config.mixed_precision.params_dtype = precision;
      const int64_t launches = launches_of_step(config, 2, 3);
      config.train.device = config::DeviceKind::checked;
      CHECK(launches_of_step(config, 2, 3) == launches);
      if (!llama || precision == config::Precision::fp32 || test::kSanitized) continue;
      // The table of the CUDA kernels: estimated and counted in launches_of_step().
      config.train.device = config::DeviceKind::simulated;
      CHECK(launches_of_step(config, 2, 3) > 0);
    }
}

TEST_CASE("the launches of a layer in 8 and 4 bits: norms and activations quantize for the next layer") {
  // Those of a Llama layer in a micro-batch beyond those in bf16; weights are quantized once in a step. A
  // matrix takes one launch; with current scaling one for its maximum and one for its scale as well; with
  // NVFP4 these for the transformed columns too. The inputs of three of the four linear layers have the first
  // of these launches from the norm or the activation before them. docs/performance.md has these numbers.
  constexpr int64_t kLinear = 4, kFused = 3, kPlain = 24;
  for (const auto& [name, choose] : kLowPrecision) {
    const std::string recipe = name;
    CAPTURE(recipe);
    config::Config config = tiny_config(true);
    choose(config.mixed_precision);
    const LayerLaunches counted = launches_of_layer(config);
    const int64_t each = recipe == "nvfp4" ? 5 : recipe == "tensorwise" ? 3 : 1;
    CHECK(counted.of_micro_batch == kPlain + 2 * kLinear * each - kFused);
    CHECK(counted.of_step == (each > 1 ? 14 : 10));
  }
}

TEST_CASE("an observed operation has run: on a device that queues kernels its time is not that of asking") {
  struct Finished final : TapeObserver {
    explicit Finished(Device& d) : device(d) {}
    void observe(const TapeEvent&) override {
      ++events;
      if (!device.record(Queue::compute)->done()) ++early;
    }
    Device& device;
    int64_t events = 0, early = 0;
  };
  config::Config config = tiny_config(true);
  config.train.device = config::DeviceKind::checked;
  StepRunner runner(config, world());
  runner.initialize();
  StepTimers timers;
  Finished finished(runner.device());
  runner.observe(&finished);
  steps(runner, config, 1, timers);
  CHECK(finished.events > 50);
  CHECK(finished.early == 0);
}

TEST_CASE("the answer to a signal names what runs and for how long") {
  std::array<char, 192> buffer;
  // seconds until the expected end; none: it is unknown.
  const auto notice = [&](const char* phase, int64_t step, std::optional<double> seconds,
                          bool lower_bound = false) {
    const int64_t now = 5'000'000'000, end = now + static_cast<int64_t>(seconds.value_or(0) * 1e9);
    return std::string(stop_notice(buffer, phase, step, seconds ? (lower_bound ? -end : end) : 0, now));
  };
  CHECK(notice("backward", 7, 11.6) == "stopping after this step, about 12 s; a second signal stops at once");
  CHECK(notice("forward", 7, 0.2) == "stopping after this step, about 1 s; a second signal stops at once");
  CHECK(notice("forward", 7, -3) ==
        "stopping after this step, which takes longer than expected; a second signal stops at once");
  CHECK(notice("", 0, {}) ==
        "stopping after the first step, which has not begun; a second signal stops at once");
  // A step that has not been timed: the estimate, rounded down, or nothing but that.
  CHECK(notice("forward", 1, 11.6, true) ==
        "stopping after this step, at least 11 s by the estimate; a second signal stops at once");
  for (const auto& [seconds, lower_bound] :
       {std::pair<std::optional<double>, bool>{0.0, true}, {0.9, true}, {-3, true}})
    CHECK(notice("forward", 1, seconds, lower_bound) ==
          "stopping after this step, the first to be timed; a second signal stops at once");
  CHECK(notice("other", 7, {}) == "stopping after this step; a second signal stops at once");
  CHECK(ExpectedStop{}.encoded() == 0);
  CHECK(ExpectedStop{0, true}.encoded() == -1);
  CHECK(ExpectedStop{1e9, true}.encoded() < -1);
  CHECK(ExpectedStop{1e9}.encoded() > 0);
  CHECK(notice("evaluate", 7, 400) ==
        "stopping after this evaluation, about 7 min; a second signal stops at once");
  CHECK(notice("evaluate", 7, {}) == "stopping after this evaluation; a second signal stops at once");
  CHECK(notice("save", 7, 119) == "stopping after this save, about 119 s; a second signal stops at once");
  CHECK(stopped_notice(buffer, 40, -1) == "stopped now; the newest checkpoint is of step 40");
  CHECK(stopped_notice(buffer, 40, 60) ==
        "stopped now, the save of step 60 is abandoned; the newest checkpoint is of step 40");
  CHECK(stopped_notice(buffer, -1, 0) ==
        "stopped now, the save of step 0 is abandoned; the run has no checkpoint");
  std::array<char, 8> small;
  CHECK(stop_notice(small, "save", 1, 5, 1).size() <= small.size());
  CHECK(stopped_notice(small, 1, 5).size() <= small.size());
}

TEST_CASE("the type of the reference GEMM, and what runs the kernels, are the device's own") {
  const auto& cpu = backend_of(config::DeviceKind::cpu);
  const auto& accelerator = backend_of(config::DeviceKind::cuda);
  const kernels::CpuFeatures features = kernels::cpu_features();
  CHECK(cpu.gemm_type(DType::f32) == DType::f32);
  CHECK(cpu.gemm_type(DType::f16) == DType::f32);
  CHECK(cpu.gemm_type(DType::bf16) == (features.native_bf16_gemm ? DType::bf16 : DType::f32));
  CHECK(cpu.kernels_text(DType::f32) == features.instruction_set);
  CHECK(cpu.kernels_text(DType::f16) ==
        std::string(features.instruction_set) + ", fp16 GEMMs widened to fp32");
  CHECK(backend_of(config::DeviceKind::simulated).kernels_text(DType::f32).empty());
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    CHECK(accelerator.gemm_type(type) == type);
    CHECK(accelerator.kernels_text(type).empty());
  }
}

TEST_CASE("the peak of GEMM throughput is measured again where a step is faster, and MFU stays below 100 %") {
  std::vector<double> measured{10, 12, 8, 30, 1000};
  size_t calls = 0;
  PeakThroughput peak([&] { return measured.at(calls++); });
  CHECK_FALSE(peak.reached(5));
  CHECK(peak.value() == 0);  // not measured: no MFU
  peak.measure();
  CHECK(peak.value() == 10);
  CHECK_FALSE(peak.reached(9));
  CHECK(calls == 1);
  CHECK(peak.reached(11));
  CHECK(peak.value() == 12);
  peak.reached(20);
  CHECK(peak.value() == 20);
  peak.reached(25);
  CHECK(peak.value() == 30);
  peak.reached(40);  // four measurements are enough
  CHECK(calls == 4);
  CHECK(peak.value() == 40);
}
