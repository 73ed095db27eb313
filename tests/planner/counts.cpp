// FLOPs and parameters against published figures, and against the parameter lists of Capstan's own models.
#include "planner/counts.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "base/text.hpp"
#include "config/resolve/resolve.hpp"
#include "models/registry.hpp"
#include "planner/published_rows.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

config::Config config_with_model(const std::string& preset, std::vector<std::string> overrides = {}) {
  config::Request request;
  request.recipe = "quickstart";
  request.unset = {"model"};
  overrides.insert(overrides.begin(), "model=" + preset);
  for (const std::string& one : overrides) request.overrides.push_back(config::Override::token(one));
  const config::Resolution recipe = config::resolve(request);
  REQUIRE_MESSAGE(recipe.ok(), config::render(recipe.diagnostics, recipe.sources));
  return recipe.config;
}

FlopConvention convention_of(const std::string& name) {
  if (name == "causal") return FlopConvention::causal;
  if (name == "full") return FlopConvention::full;
  if (name == "six_n") return FlopConvention::six_n;
  REQUIRE(name == "hardware");
  return FlopConvention::hardware;
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
    const std::string& printed = row.text("params_b");
    const size_t point = printed.find('.');
    const int digits = point == std::string::npos ? 0 : static_cast<int>(printed.size() - point - 1);
    const double counted = total_parameters(shape_of(row, false)) / 1e9;
    CAPTURE(counted);
    CHECK(fixed(counted, digits) == fixed(*parse_double(printed), digits));
    ++rows;
  }
  CHECK(rows == 69);
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
