// Changes after which a run fits, offload by formula, and the Pareto front of layouts.
#include "planner/changes.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "planner/counts.hpp"
#include "planner/memory.hpp"
#include "planner/resolver.hpp"
#include "planner/search.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

Cluster with_memory(double gib) {
  Cluster cluster = read_cluster("h100");
  cluster.usable_memory.value = static_cast<int64_t>(gib * (1 << 30));
  return cluster;
}

}  // namespace

TEST_CASE("after each change a plan fits, and takes the time and the memory that the change names") {
  for (const auto& [recipe, gib] : std::vector<std::pair<const char*, double>>{
           {"llama3-8b", 45}, {"llama3-70b", 40}, {"gpt2-1.5b", 10}, {"mixtral-8x7b", 40}}) {
    CAPTURE(recipe);
    const Cluster cluster = with_memory(gib);
    const Plan plan = make_plan(resolve(recipe, {}).value(), cluster, MemoryChoice::formula);
    REQUIRE_FALSE(plan.fits);
    const std::vector<Change> changes = ways_to_fit(plan, resolver(recipe));
    REQUIRE(changes.size() >= 2);
    double before = 0;
    for (const Change& change : changes) {
      CAPTURE(change.name);
      CHECK_FALSE(change.name.empty());
      CHECK(change.seconds >= before);
      before = change.seconds;
      const auto config = resolve(recipe, change.overrides);
      REQUIRE(config);
      // The model, the batch and the GPUs are those of the recipe.
      CHECK(*config->train.global_batch_size == plan.shape.global_batch);
      const Plan changed = make_plan(*config, cluster, MemoryChoice::formula);
      CHECK(changed.shape.gpus() == plan.shape.gpus());
      CHECK(total_parameters(changed.shape) == doctest::Approx(total_parameters(plan.shape)).epsilon(1e-3));
      CHECK(changed.fits);
      CHECK(changed.time.seconds == doctest::Approx(change.seconds));
      CHECK(changed.memory[changed.fullest].total() == doctest::Approx(change.bytes).epsilon(1e-6));
    }
  }
}

TEST_CASE("memory of changes is that of the trainer's step where that of the plan is") {
  const Cluster cluster = with_memory(45);
  const Plan plan = make_plan(resolve("llama3-8b", {}).value(), cluster);
  REQUIRE(plan.memory[plan.fullest].exact);
  const std::vector<Change> changes = ways_to_fit(plan, resolver("llama3-8b"), 2);
  REQUIRE(changes.size() == 2);
  for (const Change& change : changes) {
    CHECK(change.exact);
    const Plan exact =
        make_plan(resolve("llama3-8b", change.overrides).value(), cluster, MemoryChoice::exact);
    CHECK(exact.fits);
    CHECK(exact.memory[exact.fullest].total() == change.bytes);
  }
}

// By formula rank 1 is the fullest after the first change, by the trainer's step rank 0.
TEST_CASE("memory of changes and of layouts that is called exact is that of the fullest rank") {
  const auto exact_of = [](const std::string& recipe, std::vector<std::string> always,
                           const std::vector<std::string>& overrides) {
    always.insert(always.end(), overrides.begin(), overrides.end());
    const Plan plan = make_plan(resolve(recipe, always).value(), read_cluster("h100"), MemoryChoice::exact);
    return plan.memory[plan.fullest].total();
  };
  const std::vector<std::string> gpus = {"dist.world_size=32"};
  const auto gpt_oss = resolver("gpt-oss-120b", gpus);
  for (const Change& change : ways_to_fit(make_plan(*gpt_oss({}), read_cluster("h100")), gpt_oss)) {
    CAPTURE(change.name);
    if (change.exact) CHECK(change.bytes == exact_of("gpt-oss-120b", gpus, change.overrides));
  }
  const std::vector<std::string> fp8 = {"dist.world_size=512",
                                        "mixed_precision=bf16_with_fp8_current_scaling_mixed"};
  const auto llama = resolver("llama3-8b", fp8);
  for (const Layout& layout : search_layouts(*llama({}), read_cluster("h100"), llama).layouts) {
    CAPTURE(layout.overrides);
    if (layout.exact) CHECK(layout.bytes == exact_of("llama3-8b", fp8, layout.overrides));
  }
}

TEST_CASE("a change whose memory is by formula fits with the reserve of the formula") {
  const std::vector<std::string> gpus = {"dist.world_size=8"};
  const Cluster cluster = read_cluster("h100");
  const auto qwen = resolver("qwen3-30b-a3b", gpus);
  const Plan plan = make_plan(qwen({}).value(), cluster, MemoryChoice::exact);
  REQUIRE_FALSE(plan.fits);
  for (const Change& change : ways_to_fit(plan, qwen)) {
    CAPTURE(change.name);
    if (change.exact) continue;
    const RunShape shape = run_shape(qwen(change.overrides).value());
    CHECK(change.bytes + formula_reserve(shape, cluster) <= real(cluster.usable_memory.value));
  }
}

TEST_CASE("a plan says which times it does not have") {
  const Cluster cluster = read_cluster("h100");
  const auto warns = [&](const std::vector<std::string>& overrides, const std::string& text) {
    const auto config = resolve("llama3-8b", overrides);
    REQUIRE(config.has_value());
    const Plan plan = make_plan(*config, cluster, MemoryChoice::formula);
    return std::ranges::any_of(plan.warnings,
                               [&](const std::string& one) { return one.find(text) != one.npos; });
  };
  CHECK(warns({"optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_path=/tmp/state"},
              "a disk"));
  CHECK(warns({"dist.distributed_backend=mpi"}, "host memory"));
  CHECK_FALSE(warns({}, "host memory"));
}

TEST_CASE("sharding of frozen weights is a change after which adapters fit") {
  const std::vector<std::string> always = {"model=llama3-8b", "dist.world_size=8"};
  const Plan plan = make_plan(resolve("lora", always).value(), with_memory(45));
  REQUIRE_FALSE(plan.fits);
  const auto changes = ways_to_fit(plan, resolver("lora", always));
  CHECK(std::any_of(changes.begin(), changes.end(), [](const Change& one) { return one.name == "ZeRO 3"; }));
}

TEST_CASE("a plan that fits needs no change, and one that cannot fit has none") {
  CHECK(ways_to_fit(make_plan(resolve("gpt2-124m", {}).value(), with_memory(77)), resolver("gpt2-124m"))
            .empty());
  const Plan small = make_plan(resolve("llama3-70b", {}).value(), with_memory(0.5), MemoryChoice::formula);
  CHECK(ways_to_fit(small, resolver("llama3-70b")).empty());
}

TEST_CASE("a plan and its changes keep to the memory limit of the recipe") {
  const std::vector<std::string> limit = {"resilience.memory_limit=45GiB"};
  const auto limited = resolver("llama3-8b", limit);
  const Cluster cluster = read_cluster("h100");
  const Plan plan = make_plan(*limited({}), cluster);
  CHECK_FALSE(plan.fits);
  CHECK(plan.limits.front().ends_with("and 45.0 GiB are usable"));
  const auto changes = ways_to_fit(plan, limited);
  const auto reference =
      ways_to_fit(make_plan(resolve("llama3-8b", {}).value(), with_memory(45)), resolver("llama3-8b"));
  REQUIRE(changes.size() == reference.size());
  CHECK(changes.front().bytes == reference.front().bytes);
  for (const Layout& layout : search_layouts(*limited({}), cluster, limited).layouts)
    CHECK(layout.bytes <= 45.0 * (1 << 30));
  const auto host =
      resolve("llama3-8b", {"optimizer.optimizer_cpu_offload=true", "resilience.memory_limit_host=5GiB"});
  CHECK(make_plan(*host, cluster, MemoryChoice::formula).limits.front().starts_with("host memory: "));
}

TEST_CASE("offload that exceeds the host of a node does not fit, is not proposed, and is taken back") {
  // Eight ranks with state in host memory: 14 bytes of 8.03e9 parameters, sharded.
  const std::vector<std::string> offload = {"optimizer.optimizer_cpu_offload=true"};
  Cluster cluster = read_cluster("h100");
  CHECK(cluster.host_memory->value == 2'000'000'000'000);
  const Plan plan = make_plan(resolve("llama3-8b", offload).value(), cluster, MemoryChoice::formula);
  CHECK(plan.fits);
  CHECK(plan.host_bytes == doctest::Approx(14 * total_parameters(plan.shape)).epsilon(0.01));
  cluster.host_memory = config::Bytes{100'000'000'000};
  const Plan large = make_plan(resolve("llama3-8b", offload).value(), cluster, MemoryChoice::formula);
  CHECK_FALSE(large.fits);
  CHECK(large.limits.front().starts_with("host memory: the 8 ranks of a node need "));
  const std::vector<Change> back = ways_to_fit(large, resolver("llama3-8b", offload));
  REQUIRE_FALSE(back.empty());
  CHECK(back.front().name == "optimizer state on the GPU");
  // With 34 GiB only changes with the state in host memory are cheap.
  Cluster small = with_memory(34);
  const auto offloads = [&] {
    const Plan asked = make_plan(resolve("llama3-8b", {}).value(), small, MemoryChoice::formula);
    const auto changes = ways_to_fit(asked, resolver("llama3-8b"));
    return std::any_of(changes.begin(), changes.end(),
                       [](const Change& change) { return change.host_bytes > 1e9; });
  };
  small.host_memory.reset();
  CHECK(offloads());
  small.host_memory = config::Bytes{8'000'000'000};
  CHECK_FALSE(offloads());
}

TEST_CASE("the formula of offload agrees with the trainer's own step") {
  const std::vector<std::vector<std::string>> offloads = {
      {"optimizer.optimizer_cpu_offload=true"},
      {"optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5"},
      {"model.cpu_offloading=true", "model.cpu_offloading_num_layers=16"},
      {"model.cpu_offloading=true", "model.cpu_offloading_num_layers=31"}};
  for (const auto& overrides : offloads) {
    CAPTURE(overrides.back());
    const auto config = resolve("llama3-8b", overrides);
    REQUIRE(config);
    const Plan exact = make_plan(*config, read_cluster("h100"), MemoryChoice::exact),
               formula = make_plan(*config, read_cluster("h100"), MemoryChoice::formula);
    const RankMemory &measured = exact.memory[0], &computed = formula.memory[0];
    CHECK(std::abs(computed.total() / measured.total() - 1) < 0.03);
    CHECK(std::abs(computed.host / measured.host - 1) < 0.05);
  }
}

TEST_CASE("offload costs what its copies and the host's update cost") {
  RunShape shape = run_shape(resolve("llama3-8b", {}).value());
  Cluster cluster = read_cluster("h100");
  cluster.host_bandwidth = 50, cluster.host_memory_bandwidth = 40;
  shape.offloaded_state = 1;
  // Each of 8 ranks updates an eighth of 8.03e9 parameters: the host reads a gradient of 4 bytes, reads and
  // writes 4 of the main parameter and 8 of the moments, and writes one of 2: 30 bytes at 40 GB/s.
  const double parameters = total_parameters(shape) / 8;
  CHECK(step_time(shape, cluster).optimizer == doctest::Approx(30 * parameters / 40e9).epsilon(1e-6));
  // With fast memory the copies of 4 bytes remain.
  cluster.host_memory_bandwidth = 1e6;
  CHECK(step_time(shape, cluster).optimizer == doctest::Approx(4 * parameters / 50e9).epsilon(1e-6));
  shape.offloaded_state = 0;
  // Copies that take longer than the computation of a layer delay the step by the rest, twice.
  shape.offloaded_layers = 3, shape.recompute = {};
  cluster.host_bandwidth = 1e-3;
  const StepTime slow = step_time(shape, cluster);
  const double copied = 2.0 * 3 * layer_activations(shape, false) * real(shape.micro_batches()) / 1e6;
  CHECK(slow.work.offload + slow.work.offload_hidden == doctest::Approx(copied));
  CHECK(slow.work.offload > 0.99 * copied);
  cluster.host_bandwidth = 1e6;
  const StepTime fast = step_time(shape, cluster);
  CHECK(fast.work.offload == 0);
  shape.offloaded_layers = 0;
  CHECK(fast.seconds == doctest::Approx(step_time(shape, cluster).seconds));
}

TEST_CASE("a layout is on the front unless another one beats it by half a percent") {
  const auto layout = [](double seconds, double bytes) {
    Layout one;
    one.time.seconds = seconds, one.bytes = bytes;
    return one;
  };
  // Faster, smaller, beaten by the first, beaten by the second, hardly smaller than the first but slower.
  std::vector<Layout> layouts = {layout(10, 60),     layout(12, 40),     layout(11, 61),
                                 layout(12.5, 40.1), layout(10.5, 59.9), layout(30, 20)};
  mark_front(layouts);
  std::vector<bool> front;
  for (const Layout& one : layouts) front.push_back(one.on_front);
  CHECK(front == std::vector<bool>{true, true, false, false, false, true});
}
