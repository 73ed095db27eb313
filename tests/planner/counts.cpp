// FLOPs and parameters against published figures, and against the parameter lists of Capstan's own models.
#include "planner/counts.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "base/text.hpp"
#include "config/resolve/resolve.hpp"
#include "models/registry.hpp"
#include "planner/adapters.hpp"
#include "planner/plan.hpp"
#include "planner/published_rows.hpp"
#include "planner/resolver.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

config::Config resolved(const config::Request& request) {
  const config::Resolution recipe = config::resolve(request);
  REQUIRE_MESSAGE(recipe.ok(), config::render(recipe.diagnostics, recipe.sources));
  return recipe.config;
}

config::Config config_with_model(const std::string& preset, std::vector<std::string> overrides = {}) {
  config::Request request;
  request.recipe = "quickstart";
  request.unset = {"model"};
  overrides.insert(overrides.begin(), "model=" + preset);
  for (const std::string& one : overrides) request.overrides.push_back(config::Override::token(one));
  return resolved(request);
}

FlopConvention convention_of(const std::string& name) {
  if (name == "causal") return FlopConvention::causal;
  if (name == "full") return FlopConvention::full;
  if (name == "six_n") return FlopConvention::six_n;
  REQUIRE(name == "hardware");
  return FlopConvention::hardware;
}

// The parameters of a shape have the digits that a row prints.
void check_parameters(const PublishedRow& row, const RunShape& shape) {
  const std::string& printed = row.text("params_b");
  const size_t point = printed.find('.');
  const int digits = point == std::string::npos ? 0 : static_cast<int>(printed.size() - point - 1);
  const double counted = total_parameters(shape) / 1e9;
  CAPTURE(counted);
  CHECK(fixed(counted, digits) == fixed(*parse_double(printed), digits));
}

}  // namespace

// V1 (0.3 %) and V2 (1 %, the hardware FLOPs of SC 21).
TEST_CASE("FLOPs per token times published tokens per second give the published TFLOP/s") {
  double worst = 0, worst_hardware = 0;
  int rows = 0, hardware_rows = 0;
  for (const PublishedRow& row : published_rows("flops.csv")) {
    CAPTURE(row.name());
    const FlopConvention convention = convention_of(row.text("convention"));
    const double flops = flops_per_token(shape_of(row, row.text("gated") == "true"), convention);
    const double counted = flops * row.tokens_per_second() / 1e12;
    // llm-foundry prints the fraction of the peak of an A100 with more digits than the TFLOP/s.
    const std::string& column = convention == FlopConvention::six_n ? "mfu_pct" : "tflops_per_gpu";
    const double printed = row.number(column) * (convention == FlopConvention::six_n ? 3.12 : 1);
    const double error = std::abs(counted / printed - 1);
    const bool hardware = convention == FlopConvention::hardware;
    CAPTURE(error);
    CHECK(error <= (hardware ? 0.01 : 0.003));
    ++(hardware ? hardware_rows : rows);
    double& most = hardware ? worst_hardware : worst;
    most = std::max(most, error);
  }
  CHECK(rows > 100);
  CHECK(hardware_rows > 30);
  MESSAGE("V1: ", rows, " rows, largest error ", 100 * worst, " %; V2: ", hardware_rows,
          " rows, largest error ", 100 * worst_hardware, " %");
}

TEST_CASE("FLOPs per token of models with experts are the published ones") {
  const std::string seq = "model.seq_length=4096";
  const auto gflops = [&](const std::string& model, std::vector<std::string> overrides = {}) {
    overrides.push_back(seq);
    return flops_per_token(run_shape(config_with_model(model, overrides))) / 1e9;
  };
  // perf summary of Megatron-Bridge: TFLOP/s over tokens/s.
  CHECK(gflops("qwen3-30b-a3b") == doctest::Approx(23.01).epsilon(0.003));
  CHECK(gflops("qwen3-235b-a22b") == doctest::Approx(148.0).epsilon(0.003));
  CHECK(gflops("deepseek-v3") == doctest::Approx(249.7).epsilon(0.003));
  CHECK(gflops("deepseek-v3", {"model.mtp_num_layers=1"}) == doctest::Approx(260.0).epsilon(0.003));
  CHECK(gflops("kimi-k2") == doctest::Approx(204.5).epsilon(0.003));
}

// V3
TEST_CASE("parameters are the published ones, to the last printed digit") {
  int rows = 0;
  for (const PublishedRow& row : published_rows("parameters.csv")) {
    CAPTURE(row.name());
    check_parameters(row, shape_of(row, false));
    ++rows;
  }
  CHECK(rows == 69);
}

// Recipes are named by size: "GPT 39.1B" is gpt-a100-39.1b.
TEST_CASE("the recipes of published tables have the table's sizes, layouts, batches and parameters") {
  const auto check_recipes = [](const std::string& file, const std::string& prefix) {
    int rows = 0;
    for (const PublishedRow& row : published_rows(file)) {
      if (!row.text("model").starts_with("GPT ")) continue;
      CAPTURE(row.name());
      const std::string size = row.text("model").substr(4);
      config::Request request;
      request.recipe = prefix + size.substr(0, size.size() - 1) + "b";
      const config::Config config = resolved(request);
      const RunShape recipe = run_shape(config), published = shape_of(row, false);
      CHECK(config.model.vocab_size == published.vocab);
      for (const auto& member :
           {&RunShape::layers, &RunShape::hidden, &RunShape::heads, &RunShape::kv_groups, &RunShape::head_dim,
            &RunShape::ffn, &RunShape::vocab, &RunShape::seq, &RunShape::tp, &RunShape::pp, &RunShape::cp,
            &RunShape::dp, &RunShape::global_batch})
        CHECK(recipe.*member == published.*member);
      CHECK(config.dist.world_size == row.size("ngpu"));
      CHECK(recipe.recompute == published.recompute);
      // Which the README prints as 1.7 billion.
      if (request.recipe == "gpt-h100-1.7b")
        CHECK(total_parameters(recipe) / 1e9 == doctest::Approx(1.754).epsilon(1e-3));
      else
        check_parameters(row, recipe);
      ++rows;
    }
    return rows;
  };
  CHECK(check_recipes("parameters.csv", "gpt-a100-") == 10);
  CHECK(check_recipes("gpt_h100.csv", "gpt-h100-") == 9);
}

TEST_CASE("a token attends to those before it, up to the window") {
  RunShape s;
  s.layers = 6, s.seq = 64;
  for (const int64_t window : {0, 1, 16, 32, 63, 64, 100})
    for (const int64_t full_every : {0, 2, 3}) {
      CAPTURE(window);
      CAPTURE(full_every);
      s.window = window, s.full_every = full_every;
      double scores = 0;
      for (int64_t layer = 0; layer < s.layers; ++layer) {
        const bool full = window == 0 || (full_every > 0 && layer % full_every == full_every - 1);
        // The average over the positions of a token within the sequence, in the middle of its own.
        for (int64_t token = 0; token < s.seq; ++token)
          scores += full ? real(token) + 0.5
                         : std::min(real(token) + 0.5, real(window) - (token < window ? 0.5 : 0));
      }
      CHECK(causal_fraction(s) * real(s.layers * s.seq * s.seq) == doctest::Approx(scores).epsilon(0.02));
    }
}

TEST_CASE("the formula counts the parameters that the models list") {
  for (const auto& preset : config::Library::standard().presets("model")) {
    CAPTURE(preset.name);
    const config::Config config = config_with_model(preset.name);
    int64_t listed = 0;
    const auto model = models::build(config.model);
    for (const auto& parameter : model->parameters()) listed += parameter->spec().shape.elements();
    CHECK(total_parameters(run_shape(config)) - static_cast<double>(listed) == 0);
  }
}

TEST_CASE("adapters have the parameters of the trainer's step, six FLOPs each") {
  const std::vector<std::vector<std::string>> runs = {
      {"model=llama3-8b"},
      {"model=gemma2-9b"},
      {"model=llama3-8b", "peft=lora_attention"},
      {"model=mixtral-8x7b"},
      {"model=gpt-oss-20b"},
      {"model=deepseek-v2-lite"},
      {"model=deepseek-v2-lite", "peft=lora_attention"},
      {"model=deepseek-v2-lite", "peft=lora_experts"},
      {"model=deepseek-v2-lite", "peft.exclude_modules=['*.mlp.experts.*']"}};
  for (std::vector<std::string> overrides : runs) {
    CAPTURE(overrides);
    const auto config = planner::test::resolve("lora", overrides);
    overrides.emplace_back("peft.dim=64");
    const auto larger = planner::test::resolve("lora", overrides);
    REQUIRE((config && larger));
    const RunShape s = run_shape(*config), twice = run_shape(*larger);
    REQUIRE(s.pp * s.tp == 1);
    const AdapterParameters adapters = all_adapters(s);
    // Gradients of the trainer's step, in four bytes.
    const Plan plan = make_plan(*config, read_cluster("h100"), MemoryChoice::exact);
    const double trained = plan.memory[0].bytes[static_cast<size_t>(MemoryCategory::gradients)] / 4;
    CHECK(adapters.dense + adapters.experts / static_cast<double>(s.ep) ==
          doctest::Approx(trained).epsilon(1e-4));
    CHECK(total_parameters(twice) - total_parameters(s) == doctest::Approx(adapters.total()));
    const double active = active_parameters(twice) - active_parameters(s);
    CHECK(flops_per_token(twice) - flops_per_token(s) == doctest::Approx(6 * active));
  }
}
