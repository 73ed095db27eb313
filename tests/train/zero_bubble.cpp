// Zero-bubble schedules train with the bits of 1F1B: the same stages, another order of the weight gradients.
#include <doctest/doctest.h>

#include <cmath>
#include <iterator>
#include <map>
#include <span>
#include <sstream>

#include "support/preset_recipe.hpp"
#include "support/running.hpp"
#include "support/worlds.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;

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
  std::istringstream words(overrides);
  return test::resolve_layout(recipe, {std::istream_iterator<std::string>(words), {}});
}

using Trace = std::vector<double>;

Trace trace_of(const std::string& recipe, const std::string& overrides) {
  return test::run(resolve(recipe, overrides), 4);
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
      {2, "moe", "dist.pp=2 "},
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

namespace {

// Losses and gradient norms, and on rank 0 the parameters and moments of all ranks after them.
struct Outcome {
  Trace trace;
  std::map<std::string, std::vector<float>> tensors;
  Outcome(const std::string& recipe, const std::string& overrides) {
    const config::Config config = resolve(recipe, overrides);
    StepRunner runner(config, world());
    runner.initialize();
    trace = test::run_until(runner, config, 4);
    const test::SharedDirectory root;
    const auto checkpoint = test::save_in(root.path(), runner);
    if (world().rank() > 0) return;
    auto reader = checkpoint::Reader::open(checkpoint, checkpoint::Verification::content);
    for (const auto& [name, stored] : reader.manifest().tensors) {
      auto& values = tensors[name];
      values.resize(static_cast<size_t>(stored.shape.elements()));
      reader.read_all(name, DType::f32, std::as_writable_bytes(std::span(values)));
    }
  }
};

}  // namespace

TEST_CASE(
    "ZB-V: losses and parameters are those of 1F1B and of interleaved 1F1B, bit for bit; the norm is summed "
    "over other ranks") {
  const Case cases[] = {
      {2, "llama", "dist.pp=2 "},
      {2, "llama", "dist.pp=2" BF16 " "},
      {2, "llama", "dist.pp=2 model.hidden_dropout=0.1 model.attention_dropout=0.1" STAND_IN " "},
      {2, "lora", "dist.pp=2 "},
      {2, "moe", "dist.pp=2 "},
      {4, "moe_four", "dist.ep=2 dist.pp=2 "},
      {4, "llama", "dist.pp=4 model.num_layers=8 "},
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
    const Outcome zero_bubble(c.recipe, same + ORDER_ZB_V);
    for (const char* const order : {ORDER_1F1B, TWO_CHUNKS}) {
      INFO("compared with ", std::string(order));
      const Outcome usual(c.recipe, same + order);
      REQUIRE(usual.trace.size() == zero_bubble.trace.size());
      for (size_t i = 0; i < usual.trace.size(); ++i)
        if (i % 2 == 0)
          CHECK(zero_bubble.trace[i] == usual.trace[i]);
        else
          CHECK(zero_bubble.trace[i] == doctest::Approx(usual.trace[i]).epsilon(1e-12));
      CHECK((zero_bubble.tensors == usual.tensors));
      CHECK(usual.tensors.empty() == (world().rank() > 0));
    }
  }
}

TEST_CASE("ZB-V: both uses of a tied embedding are on the first rank") {
  if (world().size() != 2) return;
  const config::Config config = resolve("gpt", "dist.pp=2 " ORDER_ZB_V);
  StepRunner runner(config, world());
  runner.initialize();
  const bool first = world().rank() == 0;
  int tables = 0;
  for (const auto& parameter : runner.store().parameters())
    if (parameter->name() == "embedding.word_embeddings.weight") {
      ++tables;
      CHECK(parameter->spec().tied == ParamSpec::Tied::no);
    }
  CHECK(tables == (first ? 1 : 0));
  CHECK(runner.mesh().group("embedding").is_single());
  const auto& stages = runner.model().stages();
  REQUIRE(stages.size() == 2);
  CHECK(stages.front().embedding == first);
  CHECK(stages.back().head == first);
  // Summed in another order than over two ranks.
  const Trace two_tables = trace_of("gpt", "dist.pp=2 " TWO_CHUNKS),
              one_table = test::run_until(runner, config, 4);
  for (size_t i = 0; i < one_table.size(); ++i)
    CHECK(one_table[i] == doctest::Approx(two_tables[i]).epsilon(i % 2 ? 1e-4 : 1e-5));
}

TEST_CASE("a run continues with another schedule: 1F1B, ZB-H1 and ZB-V, bit for bit where stages are equal") {
  if (world().size() != 2) return;
  const test::SharedDirectory root;
  for (const char* const precision : {"", BF16}) {
    const std::string usual = std::string("dist.pp=2 " ORDER_1F1B) + precision,
                      h1 = std::string("dist.pp=2 " ORDER_ZB_H1) + precision,
                      v = std::string("dist.pp=2 " ORDER_ZB_V) + precision;
    for (const auto& [from, to] : {std::pair{usual, h1}, {h1, usual}, {usual, v}, {v, h1}}) {
      INFO(from, " → ", to);
      static int number = 0;
      const config::Config before = resolve("llama", from), after = resolve("llama", to);
      StepRunner first(before, world()), second(after, world());
      first.initialize(), second.initialize();
      test::run_until(first, before, 2);
      test::load_into(second, test::save_in(root.path() / std::to_string(number++), first));
      const Trace expected = test::run_until(first, before, 5), got = test::run_until(second, after, 5);
      if (from != v && to != v) CHECK(got == expected);
      for (size_t i = 0; i < got.size(); ++i)
        CHECK(got[i] == doctest::Approx(expected[i]).epsilon(*precision ? 2e-3 : 1e-6));
    }
  }
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
