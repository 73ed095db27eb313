// The search of layouts: its bounds, and its result against all layouts of a small grid.
#include "planner/search.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "planner/pipeline.hpp"
#include "planner/resolver.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;
using config::PipelineSchedule;

namespace {

// Nodes of one GPU with a slow network, where data parallelism costs much.
Cluster slow_network() {
  Cluster cluster = read_cluster("h100");
  cluster.gpus_per_node = 1, cluster.inter_bandwidth = 2;
  return cluster;
}

}  // namespace

TEST_CASE("the time by formula is at most that of the simulated pipeline, and close to it") {
  const Cluster cluster = read_cluster("h100");
  RunShape shape = run_shape(resolve("gpt3-175b", {}).value());
  shape.tp = 8, shape.etp = 8, shape.cp = 1, shape.dp = 1;
  for (const int64_t pp : {2, 4, 8, 12})
    for (const auto& [schedule, vpp] :
         {std::pair<PipelineSchedule, int64_t>{PipelineSchedule::one_f_one_b, 1},
          {PipelineSchedule::zb_h1, 1},
          {PipelineSchedule::zb_v, 2},
          {PipelineSchedule::interleaved, 2},
          {PipelineSchedule::interleaved, 4}})
      for (const int64_t micro_batches : {pp, 2 * pp, 3 * pp + 1, 12 * pp})
        for (const bool full : {false, true}) {
          if (schedule == PipelineSchedule::interleaved && micro_batches % pp != 0) continue;
          shape.pp = shape.group = pp, shape.vpp = vpp, shape.schedule = schedule;
          shape.global_batch = micro_batches, shape.recompute.full = full;
          split_evenly(shape);
          CAPTURE(pp);
          CAPTURE(vpp);
          CAPTURE(static_cast<int>(schedule));
          CAPTURE(micro_batches);
          const double simulated = step_time(shape, cluster).seconds,
                       formula = step_time(shape, cluster, PipelineModel::formula).seconds;
          // Simulated are a few groups of micro-batches, the others follow from them.
          CHECK(formula <= 1.002 * simulated);
          // Fewer than 2 P - 1 micro-batches do not fill a V.
          CHECK(formula > (micro_batches < 2 * pp - 1 ? 0.75 : 0.94) * simulated);
        }
}

namespace {

using Words = std::vector<std::string>;

void append(Words& words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
}

// Each combination of one entry of every list.
std::vector<Words> combinations(const std::vector<std::vector<Words>>& lists) {
  std::vector<Words> all = {{}};
  for (const auto& list : lists) {
    std::vector<Words> longer;
    for (const Words& before : all)
      for (const Words& one : list) append(longer.emplace_back(before), one);
    all = std::move(longer);
  }
  return all;
}

struct Candidate {
  config::Config config;
  double seconds = 0;
  // Of the trainer's step.
  std::optional<double> bytes;
};

// The fastest recipe that fits, by the simulated pipeline and the memory of the trainer's step. Sorts.
Candidate& fastest_of(std::vector<Candidate>& all, const Cluster& cluster) {
  for (Candidate& one : all) one.seconds = step_time(run_shape(one.config), cluster).seconds;
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
  const auto fits = [&](Candidate& one) {
    int64_t passes = 1 << 30;
    if (!one.bytes) one.bytes = exact_fullest(one.config, cluster, passes)->total();
    return *one.bytes <= static_cast<double>(cluster.usable_memory.value);
  };
  const auto found = std::find_if(all.begin(), all.end(), fits);
  REQUIRE(found != all.end());
  return *found;
}

// What a search on eight GPUs tries of a dense model of eight layers.
std::vector<Words> small_grid() {
  return combinations(
      {{{"dist.pp=1", "ddp=zero1"},
        {"dist.pp=1", "ddp=zero2"},
        {"dist.pp=1", "ddp=zero3"},
        {"dist.pp=2"},
        {"dist.pp=4"},
        {"dist.pp=8"},
        {"dist.pp=2", "dist.vpp=2"},
        {"dist.pp=4", "dist.vpp=2"},
        {"dist.pp=2", "dist.vpp=4"},
        {"dist.pp=2", "dist.pipeline_schedule=zb_h1"},
        {"dist.pp=4", "dist.pipeline_schedule=zb_h1"},
        {"dist.pp=8", "dist.pipeline_schedule=zb_h1"},
        {"dist.pp=2", "dist.vpp=2", "dist.pipeline_schedule=zb_v"},
        {"dist.pp=4", "dist.vpp=2", "dist.pipeline_schedule=zb_v"}},
       {{}, {"dist.tp=2", "dist.sp=true"}},
       {{"train.micro_batch_size=1"}, {"train.micro_batch_size=2"}, {"train.micro_batch_size=4"}},
       {{},
        {"model.recompute_granularity=selective", "model.recompute_modules=[layernorm]"},
        {"model.recompute_granularity=selective", "model.recompute_modules=[mlp]"},
        {"model.recompute_granularity=selective", "model.recompute_modules=[mlp,layernorm]"},
        {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=1"},
        {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=2"},
        {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=3"},
        {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=4"},
        {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=6"},
        {"model.recompute_granularity=full", "model.recompute_method=uniform",
         "model.recompute_num_layers=1"}}});
}

}  // namespace

// Two heads: tensor parallelism is at most 2. A rank of context parallelism would have less than 1024 tokens.
TEST_CASE("a search finds the fastest of all layouts of a small grid") {
  const Resolver resolve =
      resolver("smollm2-1.7b", {"dist.world_size=8", "model.num_layers=8", "model.seq_length=1024",
                                "model.num_attention_heads=2", "model.num_query_groups=2",
                                "model.kv_channels=64", "train.global_batch_size=16", "ddp=zero1"});
  std::vector<Candidate> all;
  for (const Words& words : small_grid())
    if (auto config = resolve(words);
        config && config->train.num_microbatches >= config->dist.pipeline_model_parallel_size)
      all.push_back({std::move(*config), 0, {}});
  struct Case {
    bool slow;
    double gib;
    // Of the best.
    int64_t pp;
    PipelineSchedule schedule;
    std::string recomputation;
  };
  using enum PipelineSchedule;
  for (const Case& one : {// Few micro-batches on many ranks: weight gradients fill the bubble.
                          Case{true, 40, 8, zb_h1, "none"},
                          // They take memory.
                          Case{true, 3.2, 8, one_f_one_b, "none"}, Case{true, 3, 8, one_f_one_b, "mlp"},
                          Case{false, 4.6, 1, one_f_one_b, "none"}}) {
    Cluster cluster = one.slow ? slow_network() : read_cluster("h100");
    cluster.usable_memory.value = static_cast<int64_t>(one.gib * (1 << 30));
    CAPTURE(one.slow);
    CAPTURE(one.gib);
    const SearchResult found = search_layouts(resolve({}).value(), cluster, resolve);
    REQUIRE_FALSE(found.layouts.empty());
    const Layout& first = found.layouts.front();
    const Candidate& best = fastest_of(all, cluster);
    CHECK(first.time.seconds == doctest::Approx(best.seconds));
    CHECK(first.shape.pp == one.pp);
    CHECK(first.shape.schedule == one.schedule);
    CHECK(recomputation_text(first.shape) == one.recomputation);
  }
}

TEST_CASE("where no layout divides the batch, a search names the nearest batches that one divides") {
  const Resolver resolve = resolver("llama3-70b");
  config::Config config = resolve({}).value();
  config.dist.world_size = 97;
  const auto search = [&] { return search_layouts(config, read_cluster("h100"), resolve); };
  // A prime above the number of layers is left to data parallelism.
  const SearchResult found = search();
  CHECK(found.tried == 0);
  CHECK(found.batches == std::vector<int64_t>{485, 582});
  config.train.global_batch_size = 582;
  CHECK(search().tried > 0);
}

// 96 layers on eight stages are one for each of twelve chunks; with both ends 98 divide by neither twelve nor
// the recipe's six.
TEST_CASE("a search tries each number of chunks that the layers divide into, and lists the recipe itself") {
  const Resolver resolve = resolver("gpt3-175b");
  const Cluster cluster = read_cluster("h100");
  const SearchResult found = search_layouts(resolve({}).value(), cluster, resolve);
  REQUIRE_FALSE(found.layouts.empty());
  const Layout& first = found.layouts.front();
  CHECK(std::any_of(found.layouts.begin(), found.layouts.end(),
                    [](const Layout& one) { return one.shape.pp == 8 && one.shape.vpp == 12; }));
  const auto own = std::find_if(found.layouts.begin(), found.layouts.end(),
                                [](const Layout& one) { return one.is_recipe(); });
  REQUIRE(own != found.layouts.end());
  const Plan plan = make_plan(resolve({}).value(), cluster);
  CHECK(own->shape.vpp == 6);
  CHECK(own->time.seconds == plan.time.seconds);
  CHECK(own->bytes == plan.memory[plan.fullest].total());
  CHECK(own->exact == plan.memory[plan.fullest].exact);
  CHECK(first.time.seconds < own->time.seconds);
}

TEST_CASE("a search divides a sequence as far as 1024 tokens for each rank") {
  const Resolver resolve =
      resolver("llama3-8b", {"dist.world_size=1024", "dist.tp=8", "dist.sp=true", "dist.cp=128",
                             "model.seq_length=1048576", "train.global_batch_size=1"});
  const SearchResult found = search_layouts(resolve({}).value(), read_cluster("h100"), resolve);
  REQUIRE_FALSE(found.layouts.empty());
  CHECK(found.layouts.front().shape.cp == 128);
}

TEST_CASE("a search tries all micro-batches that divide the samples of a replica") {
  const Resolver resolve = resolver("codeparrot-110m");
  const SearchResult found = search_layouts(resolve({}).value(), read_cluster("h100"), resolve);
  REQUIRE_FALSE(found.layouts.empty());
  // Of 192 samples on eight GPUs.
  CHECK(found.layouts.front().shape.micro_batch == 24);
}

TEST_CASE("shipped layouts of models with experts are not far from the best of a search" *
          doctest::test_suite("full")) {
  for (const char* recipe :
       {"mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-120b", "qwen3-235b-a22b"}) {
    CAPTURE(recipe);
    const Resolver resolve = resolver(recipe);
    const Cluster cluster = read_cluster("h100");
    const SearchResult found = search_layouts(resolve({}).value(), cluster, resolve);
    REQUIRE_FALSE(found.layouts.empty());
    CHECK(step_time(run_shape(resolve({}).value()), cluster).seconds <
          1.5 * found.layouts.front().time.seconds);
  }
}

TEST_CASE("a search divides 61 layers over pipelines whose last stage has fewer") {
  const Resolver resolve = resolver("deepseek-v3");
  const Cluster cluster = read_cluster("h100");
  const SearchResult found = search_layouts(resolve({}).value(), cluster, resolve);
  int pipelines = 0;
  for (const Layout& one : found.layouts) {
    const auto config = resolve(one.overrides);
    REQUIRE(config);
    const RunShape shape = run_shape(*config);
    CHECK(step_time(shape, cluster).seconds == doctest::Approx(one.time.seconds));
    pipelines += shape.pp > 1 ? 1 : 0;
  }
  CHECK(pipelines > 2);
  // The recipe's pipeline is another one.
  const RunShape base = run_shape(resolve({"dist.pp=8", "~dist.pipeline_model_parallel_layout",
                                           "dist.num_layers_in_last_pipeline_stage=5"})
                                      .value());
  RunShape sixteen = base;
  sixteen.pp = sixteen.group = 16, sixteen.dp = base.dp / 2;
  REQUIRE(divide_layers(sixteen));
  CHECK(sixteen.stages.front().layers() == 4);
  CHECK(sixteen.stages.back().layers() == 1);
  CHECK(overrides_of(base, sixteen) ==
        std::vector<std::string>{"dist.pp=16", "dist.num_layers_in_last_pipeline_stage=1"});
}

TEST_CASE("every layout of a search of a model with experts is a recipe that fits, with what it names") {
  const Resolver resolve =
      resolver("mixtral-8x7b", {"dist.world_size=8", "dist.pp=1", "dist.vpp=null", "model.num_layers=4"});
  Cluster cluster = read_cluster("h100");
  cluster.usable_memory.value = int64_t{20} << 30;
  const SearchResult found = search_layouts(resolve({}).value(), cluster, resolve);
  REQUIRE(found.layouts.size() > 5);
  for (const Layout& one : found.layouts) {
    const auto config = resolve(one.overrides);
    REQUIRE(config);
    const RunShape shape = run_shape(*config);
    CHECK(shape.schedule == one.shape.schedule);
    CHECK(shape.recompute == one.shape.recompute);
    CHECK(shape.etp == one.shape.etp);
    CHECK(step_time(shape, cluster).seconds == doctest::Approx(one.time.seconds));
    int64_t passes = 1 << 30;
    CHECK(exact_fullest(*config, cluster, passes)->total() <=
          static_cast<double>(cluster.usable_memory.value));
  }
}

TEST_CASE("the formula of memory agrees with the trainer's step for schedules, recomputation and experts") {
  const Words small = {"dist.pp=4", "train.global_batch_size=32"};
  const Words selective = {"model.recompute_granularity=selective"};
  const std::vector<std::pair<const char*, std::vector<Words>>> cases = {
      {"gpt2-1.5b", {small, {"dist.pipeline_schedule=zb_h1"}}},
      {"gpt2-1.5b", {small, {"dist.pipeline_schedule=zb_v"}}},
      {"gpt2-1.5b", {small, {"dist.pipeline_schedule=zb_h1"}, selective, {"model.recompute_modules=[mlp]"}}},
      {"gpt2-1.5b", {small, selective, {"model.recompute_modules=[layernorm]"}}},
      {"llama3-8b", {small, {"dist.cp=1", "dist.tp=2", "dist.sp=true", "dist.pipeline_schedule=zb_h1"}}},
      {"mixtral-8x7b",
       {{"dist.pp=1", "dist.vpp=null", "ddp=zero3", "dist.tp=2", "dist.sp=true", "dist.ep=4", "dist.etp=2"}}},
      {"mixtral-8x7b",
       {{"dist.pp=1", "dist.vpp=null", "ddp=zero3", "dist.tp=4", "dist.sp=true", "dist.ep=2",
         "dist.etp=4"}}}};
  for (const auto& [recipe, lists] : cases) {
    Words words;
    for (const Words& list : lists) append(words, list);
    CAPTURE(recipe);
    CAPTURE(words.back());
    const auto config = resolve(recipe, words);
    REQUIRE(config);
    const Plan exact = make_plan(*config, read_cluster("h100"), MemoryChoice::exact),
               formula = make_plan(*config, read_cluster("h100"), MemoryChoice::formula);
    const size_t rank = exact.fullest;
    CHECK(std::abs(formula.memory[rank].total() / exact.memory[rank].total() - 1) < 0.05);
  }
}

TEST_CASE("ranks that share an expert gather its rows and reduce its outputs") {
  RunShape shape = run_shape(resolve("mixtral-8x7b", {"dist.pp=1", "dist.vpp=null", "dist.tp=2",
                                                      "dist.sp=true", "dist.ep=4", "dist.etp=1"})
                                 .value());
  const Cluster cluster = read_cluster("h100");
  const auto sent = [&] {
    for (const LinkTraffic& one : link_traffic(shape, cluster, step_time(shape, cluster)))
      if (one.part == "tensor_parallel") return one.fast_bytes;
    return 0.0;
  };
  const double alone = sent();
  shape.etp = 2;
  // The rows of both ranks: each token on one of them, for two experts, 4096 numbers of two bytes. A rank
  // sends half of them in a collective, two in the forward and two in the backward pass of each layer.
  const double rows = shape.tokens() * 2 * 4096 * 2;
  const double layers = 32 * real(shape.micro_batches());
  CHECK(sent() - alone == doctest::Approx(layers * 4 * rows / 2));
}
