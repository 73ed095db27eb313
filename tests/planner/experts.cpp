// V11: steps of models with experts against published figures. Nothing in the cluster files comes from these
// rows. Their columns `dispatcher`, `overlap_ep`, `recompute`, `etp` and `layout` are those of the recipes of
// the release that published a row (docs/planning.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "config/resolve/resolve.hpp"
#include "planner/counts.hpp"
#include "planner/published_rows.hpp"
#include "planner/step_time.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

// The row as overrides of a recipe.
std::vector<std::string> overrides_of(const PublishedRow& row) {
  std::vector<std::string> words = {"model=" + row.text("preset"), "mixed_precision=bf16_mixed",
                                    "dist.world_size=" + row.text("ngpu")};
  const auto set = [&](const std::string& field, const std::string& value) {
    words.push_back(field + "=" + value);
  };
  const auto size = [&](const std::string& field, const std::string& column) {
    if (row.size(column) > 1) set(field, std::to_string(row.size(column)));
  };
  set("model.seq_length", row.text("seq"));
  set("model.max_position_embeddings", "null");
  set("model.num_layers", row.text("layers"));
  size("dist.tp", "tp"), size("dist.pp", "pp"), size("dist.cp", "cp"), size("dist.ep", "ep");
  if (row.size("tp") > 1) set("dist.sp", "true");
  set("dist.etp", row.text("etp"));
  if (row.size("vpp") > 1) size("dist.vpp", "vpp"), set("dist.pipeline_schedule", "interleaved");
  set("train.micro_batch_size", row.text("mbs"));
  set("train.global_batch_size", row.text("gbs"));
  set("ddp", row.text("notes").find("FSDP") == std::string::npos ? "zero1" : "zero3");
  const int64_t stages = row.size("pp") * row.size("vpp");
  if (row.has("layout")) {
    set("dist.pipeline_model_parallel_layout", "\"" + row.text("layout") + "\"");
    if (row.text("layout").find('m') != std::string::npos) set("model.mtp_num_layers", "1");
  } else if (row.size("layers") % stages != 0) {
    set("dist.account_for_embedding_in_pipeline_split", "true");
    set("dist.account_for_loss_in_pipeline_split", "true");
  }
  const std::string& recompute = row.text("recompute");
  if (recompute == "full") {
    set("model.recompute_granularity", "full");
  } else if (recompute != "none") {
    set("model.recompute_granularity", "selective");
    set("model.recompute_modules", "[" + recompute + "]");
  }
  // Grok-1 has no preset; the rows of SimuMax have one dense layer of four.
  if (row.text("model").starts_with("Grok-1"))
    for (const char* word : {"model.hidden_size=6144", "model.ffn_hidden_size=32768",
                             "model.num_attention_heads=48", "model.vocab_size=131072"})
      words.emplace_back(word);
  if (row.text("source").find("SimuMax") != std::string::npos) set("model.moe_first_dense_layers", "1");
  return words;
}

RunShape expert_shape(const PublishedRow& row) {
  config::Request request;
  request.recipe = "quickstart";
  request.unset = {"model"};
  for (const std::string& one : overrides_of(row)) request.overrides.push_back(config::Override::token(one));
  const config::Resolution recipe = config::resolve(request);
  REQUIRE_MESSAGE(recipe.ok(), row.name(), ": ", config::render(recipe.diagnostics, recipe.sources));
  RunShape shape = run_shape(recipe.config);
  // Transformer Engine multiplies codes.
  shape.experts->decodes_codes = false;
  // SimuMax states that nothing is overlapped.
  const bool overlaps = row.text("source").find("SimuMax") == std::string::npos;
  shape.overlap_grad_reduce = shape.overlap_param_gather = shape.overlap_tp = overlaps;
  if (row.text("source").starts_with("Megatron-Bridge")) shape.reduced_bytes = 2;
  if (row.text("precision") != "bf16") shape.format = GemmFormat::fp8;
  // Current scaling in all rows in 8 bits with one scale for a tensor.
  if (row.text("precision") == "fp8") shape.quantized_bytes = 6;
  if (row.text("dispatcher") == "deduplicated") shape.dispatch = TokenDispatch::deduplicated;
  shape.overlap_ep = row.text("overlap_ep") == "true";
  return shape;
}

double measured_seconds(const PublishedRow& row, const RunShape& shape) {
  if (row.has("iter_time_s")) return row.number("iter_time_s");
  const double tokens = row.has("tokens_per_s_per_gpu")
                            ? row.number("tokens_per_s_per_gpu")
                            : 1e12 * row.number("tflops_per_gpu") / flops_per_token(shape);
  return real(shape.tokens_per_step()) / tokens / row.number("ngpu");
}

}  // namespace

TEST_CASE("published steps with experts are predicted within 20 % in the mean") {
  // Predicted by measured seconds of the rows of a GPU and format, and of rows with and without CUDA graphs.
  std::map<std::string, std::vector<double>> ratios;
  std::map<std::string, std::pair<double, int>> by_graphs;
  std::vector<double> longer;
  double sum = 0;
  int rows = 0;
  for (const PublishedRow& row : published_rows("experts.csv")) {
    CAPTURE(row.name());
    const RunShape shape = expert_shape(row);
    const double ratio =
        step_time(shape, read_cluster(row.text("cluster"))).seconds / measured_seconds(row, shape);
    const std::string key = row.text("cluster") + " " + row.text("precision");
    MESSAGE(row.name(), ", ", key, ", ", row.text("ngpu"), " GPUs: ", 100 * (ratio - 1), " %");
    ratios[key].push_back(ratio), longer.push_back(1 / ratio);
    auto& [total, count] = by_graphs[row.text("cuda_graphs")];
    total += std::abs(ratio - 1), ++count;
    sum += std::abs(ratio - 1), ++rows;
  }
  CHECK(rows == 102);
  std::ranges::sort(longer);
  MESSAGE("measured steps took ", longer[longer.size() / 2], " times as long in the median, at most ",
          longer.back(), " times");
  MESSAGE("V11: ", rows, " rows, mean ", 100 * sum / rows, " %");
  for (const auto& [graphs, total] : by_graphs)
    MESSAGE("CUDA graphs ", graphs.empty() ? "not stated" : graphs, ": ", total.second, " rows, mean ",
            100 * total.first / total.second, " %");
  CHECK(sum / rows <= 0.20);
  CHECK(mean_after_one(ratios, "V11") <= 0.24);
}
