// Zero-bubble schedules train with the bits of 1F1B: the same stages, another order of the weight gradients.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "checkpoint/writer.hpp"
#include "config/resolve/resolve.hpp"
#include "support/paths.hpp"
#include "support/worlds.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
namespace fs = std::filesystem;

namespace {

using test::world;

#define BF16 " mixed_precision=bf16_mixed"
#define SHARD " ddp.data_parallel_sharding_strategy="
#define OVERLAP " ddp.overlap_grad_reduce=true ddp.bucket_size=2000"
#define STAND_IN " train.device=checked dist.distributed_backend=nccl_stand_in"
// The schedules of the same stages, on the same ranks and in the shape of a V.
#define ORDER_1F1B "dist.pipeline_schedule=1f1b"
#define ORDER_ZB_H1 "dist.pipeline_schedule=zb_h1"
#define TWO_CHUNKS "dist.vpp=2"
#define ORDER_ZB_V "dist.pipeline_schedule=zb_v"

config::Config resolve(const std::string& recipe, const std::string& overrides) {
  config::Request request;
  request.recipe = std::string(test::kSourceDirectory) + "/tests/train/layouts/" + recipe + ".yaml";
  std::istringstream words(overrides + " dist.world_size=" + std::to_string(world().size()));
  for (std::string word; words >> word;) request.overrides.push_back(config::Override::token(word));
  const config::Resolution resolution = config::resolve(request);
  resolution.require_ok();
  return resolution.config;
}

using Trace = std::vector<double>;

// A trainer that begins with the initial parameters, or with a checkpoint.
class Run {
 public:
  Run(const std::string& recipe, const std::string& overrides, const fs::path& checkpoint = {})
      : config_(resolve(recipe, overrides)),
        runner_(config_, world()),
        data_(open_datasets(config_, nullptr)) {
    runner_.initialize();
    if (!checkpoint.empty()) {
      auto reader = checkpoint::Reader::open(checkpoint, checkpoint::Depth::content);
      runner_.state() = load_state(reader, runner_.store(), &runner_.optimizer());
    }
    loader_ = std::make_unique<data::Loader>(data_[0], runner_.loader_options());
  }
  // Losses and gradient norms.
  Trace steps(int count) {
    Trace trace;
    for (int i = 0; i < count; ++i) {
      const StepResult result = runner_.train_step(*loader_, timers_);
      trace.insert(trace.end(), {result.loss, result.gradient_norm});
    }
    return trace;
  }
  fs::path save(const fs::path& root) {
    SavePlan plan;
    plan.root = root;
    if (world().rank() == 0) fs::create_directories(root);
    world().communicator().barrier();
    return save_state(world(), plan, runner_.state(), runner_.store(), runner_.optimizer());
  }
  const config::Config& config() const { return config_; }
  StepRunner& runner() { return runner_; }

 private:
  const config::Config config_;
  StepRunner runner_;
  decltype(open_datasets(config_, nullptr)) data_;
  std::unique_ptr<data::Loader> loader_;
  StepTimers timers_;
};

Trace trace_of(const std::string& recipe, const std::string& overrides) {
  return Run(recipe, overrides).steps(4);
}

// The same on all ranks.
fs::path scratch() {
  int64_t id = ::getpid();
  world().communicator().broadcast(&id, sizeof id, 0);
  return fs::temp_directory_path() / ("capstan-zero-bubble-" + std::to_string(id));
}

struct Case {
  int ranks;
  const char *recipe, *overrides;
};

}  // namespace

TEST_CASE("ZB-H1: losses and gradient norms are those of 1F1B, bit for bit") {
  const Case cases[] = {
      {2, "llama", "dist.pp=2 "},
      {2, "gpt", "dist.pp=2 model.hidden_dropout=0.1 model.attention_dropout=0.1 "},
      {2, "gpt", "dist.pp=2" BF16 " "},
      {2, "llama", "dist.pp=2 mixed_precision.fp8=hybrid mixed_precision.fp8_recipe=tensorwise" BF16 " "},
      {2, "lora", "dist.pp=2 "},
      {2, "dora", "dist.pp=2" BF16 " "},
      {2, "llama",
       "dist.pp=2 model.recompute_granularity=full model.recompute_method=uniform "
       "model.recompute_num_layers=1 "},
      {2, "llama", "dist.pp=2" STAND_IN " "},
      {4, "gpt", "dist.pp=4 "},
      {4, "llama", "dist.pp=4" BF16 STAND_IN " "},
      {4, "llama", "dist.tp=2 dist.sp=true dist.pp=2 "},
      {4, "llama", "dist.cp=2 dist.pp=2 "},
      {4, "gpt", "dist.pp=2" OVERLAP " "},
      {4, "llama", "dist.pp=2" SHARD "optim" OVERLAP BF16 " "},
  };
  for (const Case& c : cases) {
    if (c.ranks != world().size()) continue;
    INFO(std::string(c.recipe), " ", std::string(c.overrides));
    const Trace usual = trace_of(c.recipe, std::string(c.overrides) + ORDER_1F1B),
                zero_bubble = trace_of(c.recipe, std::string(c.overrides) + ORDER_ZB_H1);
    REQUIRE(zero_bubble.size() == usual.size());
    for (size_t i = 0; i < usual.size(); ++i) CHECK(zero_bubble[i] == usual[i]);
    CHECK(std::isfinite(usual.back()));
  }
}

// The gradient of the output layer is computed in the forward pass. Where gradients of each micro-batch are
// reduced apart, a bucket that still waits for its other weight gradients takes in that of the next forward
// pass: the two are added before the reduction, not after it.
TEST_CASE("ZB-H1: with sharded gradients, the output layer's are rounded in another order than with 1F1B") {
  for (const char* const overrides :
       {"dist.pp=2" SHARD "optim_grads" OVERLAP " ",
        "dist.pp=2" SHARD "optim_grads_params" OVERLAP " ddp.overlap_param_gather=true" STAND_IN " "}) {
    if (world().size() != 4) return;
    INFO(std::string(overrides));
    const Trace usual = trace_of("llama", std::string(overrides) + ORDER_1F1B),
                zero_bubble = trace_of("llama", std::string(overrides) + ORDER_ZB_H1);
    REQUIRE(zero_bubble.size() == usual.size());
    CHECK(zero_bubble[0] == usual[0]);
    for (size_t i = 1; i < usual.size(); ++i)
      CHECK(zero_bubble[i] == doctest::Approx(usual[i]).epsilon(1e-7));
  }
}

TEST_CASE("ZB-V: losses are those of interleaved 1F1B, bit for bit; the norm is summed over other ranks") {
  const Case cases[] = {
      {2, "llama", "dist.pp=2 "},
      {2, "llama", "dist.pp=2" BF16 " "},
      {2, "llama", "dist.pp=2 model.hidden_dropout=0.1 model.attention_dropout=0.1" STAND_IN " "},
      {2, "lora", "dist.pp=2 "},
      {4, "llama", "dist.tp=2 dist.sp=true dist.pp=2 "},
      {4, "llama", "dist.cp=2 dist.pp=2" BF16 " "},
      {4, "llama", "dist.pp=2" SHARD "optim" OVERLAP " "},
      {4, "llama", "dist.pp=2" SHARD "optim_grads" OVERLAP BF16 " "},
      {4, "llama", "dist.pp=2" SHARD "optim_grads_params" OVERLAP STAND_IN " "},
  };
  for (const Case& c : cases) {
    if (c.ranks != world().size()) continue;
    INFO(std::string(c.recipe), " ", std::string(c.overrides));
    // Clipping would spread the last bit of the norm.
    const std::string same = std::string(c.overrides) + "optimizer.clip_grad=0 ";
    const Trace usual = trace_of(c.recipe, same + TWO_CHUNKS),
                zero_bubble = trace_of(c.recipe, same + ORDER_ZB_V);
    REQUIRE(usual.size() == zero_bubble.size());
    for (size_t i = 0; i < usual.size(); ++i)
      if (i % 2 == 0)
        CHECK(zero_bubble[i] == usual[i]);
      else
        CHECK(zero_bubble[i] == doctest::Approx(usual[i]).epsilon(1e-12));
  }
}

TEST_CASE("ZB-V: both uses of a tied embedding are on the first rank") {
  if (world().size() != 2) return;
  Run run("gpt", "dist.pp=2 " ORDER_ZB_V);
  const bool first = world().rank() == 0;
  int tables = 0;
  for (const auto& parameter : run.runner().store().parameters())
    if (parameter->name() == "embedding.word_embeddings.weight") {
      ++tables;
      CHECK(parameter->spec().tied == ParamSpec::Tied::no);
    }
  CHECK(tables == (first ? 1 : 0));
  CHECK(run.runner().mesh().group("embedding").is_single());
  const auto& stages = run.runner().model().stages();
  REQUIRE(stages.size() == 2);
  CHECK(stages.front().embedding == first);
  CHECK(stages.back().head == first);
  // Summed in another order than over two ranks.
  const Trace two_tables = trace_of("gpt", "dist.pp=2 " TWO_CHUNKS), one_table = run.steps(4);
  for (size_t i = 0; i < one_table.size(); ++i)
    CHECK(one_table[i] == doctest::Approx(two_tables[i]).epsilon(i % 2 ? 1e-4 : 1e-5));
}

TEST_CASE("a run continues with another schedule: 1F1B, ZB-H1 and ZB-V, bit for bit where stages are equal") {
  if (world().size() != 2) return;
  const fs::path root = scratch();
  for (const char* const precision : {"", BF16}) {
    const std::string usual = std::string("dist.pp=2 " ORDER_1F1B) + precision,
                      h1 = std::string("dist.pp=2 " ORDER_ZB_H1) + precision,
                      v = std::string("dist.pp=2 " ORDER_ZB_V) + precision;
    for (const auto& [from, to] : {std::pair{usual, h1}, {h1, usual}, {usual, v}, {v, h1}}) {
      INFO(from, " → ", to);
      static int number = 0;
      Run first("llama", from);
      first.steps(2);
      const fs::path saved = first.save(root / std::to_string(number++));
      const Trace expected = first.steps(3), got = Run("llama", to, saved).steps(3);
      if (from != v && to != v) CHECK(got == expected);
      for (size_t i = 0; i < got.size(); ++i)
        CHECK(got[i] == doctest::Approx(expected[i]).epsilon(*precision ? 2e-3 : 1e-6));
    }
  }
  world().communicator().barrier();
  if (world().rank() == 0) fs::remove_all(root);
}

TEST_CASE("memory: rank 0 needs no more than with 1F1B but the inputs of weight gradients, as estimated") {
  if (world().size() != 4) return;
  // The estimate of activations, all of whose bytes the run has taken (tests/train/layouts.cpp).
  const auto activations = [&](const char* overrides, int64_t rank) {
    const StepEstimate estimate =
        estimate_step(resolve("llama", std::string("dist.pp=4 ") + overrides), rank);
    return estimate.memory.peak_by_category[static_cast<size_t>(MemoryCategory::activations)];
  };
  const int64_t usual = activations(ORDER_1F1B, 0);
  for (int64_t rank = 0; rank < 4; ++rank) {
    // As many micro-batches as rank 0 of 1F1B holds, of which rank r holds r as inputs of weight gradients.
    const int64_t held = activations(ORDER_ZB_H1, rank);
    CHECK(held <= usual + usual / 4);
    if (rank > 0) CHECK(held > activations(ORDER_1F1B, rank));
  }
}
