// Values that follow from each other, through all of the resolution: whichever one a recipe gives, the others
// follow, and only what really followed says so.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "config/core/emit.hpp"
#include "config/resolve/resolve.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "config/tools/show.hpp"

using namespace capstan;
using namespace capstan::config;

namespace {

constexpr const char* kStages = "dist.virtual_pipeline_model_parallel_size";
constexpr const char* kLayers = "dist.num_layers_per_virtual_pipeline_stage";
constexpr const char* kLayout = "dist.pipeline_model_parallel_layout";

// quickstart with 8 layers on 2 pipeline ranks, and what `overrides` say.
Resolution resolved_pipeline(std::vector<std::string> overrides) {
  Request request;
  request.recipe = "quickstart";
  request.ranks = 2;
  overrides.insert(overrides.begin(), {"model.num_layers=8", "dist.pp=2"});
  for (const auto& text : overrides) request.overrides.push_back(Override::token(text));
  return resolve(request);
}

std::string value(const Resolution& r, const std::string& path) {
  const FieldInfo* field = schema().find_field(path);
  REQUIRE(field != nullptr);
  return yaml_inline(*field->type, schema().load(&r.config, *field));
}

std::string origin(const Resolution& r, const std::string& path) {
  return r.origin(path).text.substr(0, 8);  // "derived:", "default", "<cli>:3"
}

}  // namespace

TEST_CASE("of virtual stages, layers of one, and the layout one is given and the others follow") {
  struct Row {
    const char* given;
    const char *stages, *layers, *layout;
  };
  for (const Row& row : {Row{"dist.virtual_pipeline_model_parallel_size=2", "2", "2", "Ett|tt|tt|ttL"},
                         {"dist.num_layers_per_virtual_pipeline_stage=2", "2", "2", "Ett|tt|tt|ttL"},
                         {"dist.pipeline_model_parallel_layout=Ett|tt|tt|ttL", "2", "2", "Ett|tt|tt|ttL"},
                         {"dist.num_layers_per_virtual_pipeline_stage=1", "4", "1", "Et|(t|)*6tL"},
                         {"dist.pipeline_model_parallel_layout=Et|(t|)*6tL", "4", "1", "Et|(t|)*6tL"}}) {
    CAPTURE(std::string(row.given));
    // The result does not depend on which field is evaluated first: here another field reads one of the
    // three.
    for (const std::string& first : {std::string(), std::string(kStages), std::string(kLayers)}) {
      CAPTURE(first);
      std::vector<std::string> overrides{row.given};
      if (!first.empty()) overrides.push_back("rng.seed=${" + first + "}");
      const auto r = resolved_pipeline(overrides);
      CHECK_MESSAGE(r.ok(), render(r.diagnostics, r.sources));
      CHECK(value(r, kStages) == row.stages);
      CHECK(value(r, kLayers) == row.layers);
      CHECK(r.config.dist.pipeline_model_parallel_layout == row.layout);
      int derived = 0, written = 0;
      for (const char* path : {kStages, kLayers, kLayout}) {
        derived += origin(r, path) == "derived:";
        written += origin(r, path) == "<cli>:3";
      }
      CHECK(derived == 2);
      CHECK(written == 1);
      CHECK(r.config.dist.pipeline_schedule == PipelineSchedule::interleaved);
      CHECK(r.config.comm_overlap.overlap_p2p_comm == true);
    }
  }
}

TEST_CASE("a derivation that does not apply leaves the default, and the default's origin") {
  const auto none = resolved_pipeline({});
  CHECK_MESSAGE(none.ok(), render(none.diagnostics, none.sources));
  CHECK(origin(none, kStages) == "default");
  CHECK(origin(none, kLayers) == "default");
  CHECK(none.config.dist.pipeline_model_parallel_layout == "Et*4|t*4L");
  CHECK(origin(none, kLayout) == "derived:");

  // Stages of different sizes have no one number of layers.
  const auto uneven = resolved_pipeline({"dist.pipeline_model_parallel_layout=Et|tt|ttt|ttL"});
  CHECK_MESSAGE(uneven.ok(), render(uneven.diagnostics, uneven.sources));
  CHECK(value(uneven, kStages) == "2");
  CHECK(origin(uneven, kStages) == "derived:");
  CHECK(value(uneven, kLayers) == "null");
  CHECK(origin(uneven, kLayers) == "default");
  const auto ends = resolved_pipeline({"dist.vpp=2", "dist.num_layers_in_first_pipeline_stage=2"});
  CHECK(value(ends, kLayers) == "null");
  CHECK(value(ends, kLayout) == "Et|t*3|t|t*3L");
  // Without a pipeline these fields have no effect: one stage has all layers.
  Config one;
  one.model.num_layers = 8;
  one.dist.num_layers_in_first_pipeline_stage = 2;
  one.dist.num_layers_in_last_pipeline_stage = 1;
  one.dist.pipeline_model_parallel_layout = "Et|t";
  const auto stages = pipeline_stages(one);
  REQUIRE(stages);
  REQUIRE(stages->size() == 1);
  CHECK(stages->front().layers == 8);

  Request request;
  request.recipe = "quickstart";
  const auto flat = resolve(request);
  for (const char* path :
       {kStages, kLayers, kLayout, "dist.expert_data_parallel_size", "dist.expert_tensor_parallel_size",
        "model.moe_ffn_hidden_size", "model.recompute_modules"}) {
    CAPTURE(std::string(path));
    CHECK(flat.origin(path).text == "default");
  }
  CHECK(flat.origin("dist.data_parallel_size").text.starts_with("derived: "));
  for (const auto& [path, from] : flat.origins) {
    CAPTURE(path);
    if (from.kind != Origin::Kind::derived) continue;
    CHECK_FALSE(schema().load(&flat.config, *schema().find_field(path)).is_null());
  }
}

TEST_CASE("a value given by what is derived from it is a circle") {
  const auto r = resolved_pipeline({"dist.vpp=${dist.num_layers_per_virtual_pipeline_stage}"});
  REQUIRE(r.diagnostics.size() == 1);
  CHECK(r.diagnostics[0].code == "C0403");
  CHECK(r.diagnostics[0].message ==
        "`dist.num_layers_per_virtual_pipeline_stage` is derived from "
        "`dist.virtual_pipeline_model_parallel_size`, which is given by it");
  CHECK(location_text(r.diagnostics[0].location, r.sources, false) == "<cli>:3");
}

TEST_CASE("a world that does not fit is answered once, with both grids") {
  const auto world = [](int64_t ranks, std::vector<std::string> overrides) {
    Request request;
    request.recipe = "quickstart";
    request.ranks = ranks;
    overrides.push_back("model.num_moe_experts=8");
    for (const auto& text : overrides) request.overrides.push_back(Override::token(text));
    const auto r = resolve(request);
    std::string codes;
    for (const auto& d : r.diagnostics)
      if (d.level == Level::error && d.code.starts_with("R010")) codes += d.code + " ";
    return std::pair(codes, render(r.diagnostics, r.sources));
  };
  const auto has = [](const std::string& text, const char* part) {
    CAPTURE(text);
    CAPTURE(std::string(part));
    CHECK(text.find(part) != std::string::npos);
  };
  // Neither grid: 4 and 3.
  const auto neither = world(10, {"dist.tp=4", "dist.sp=true", "dist.etp=1", "dist.ep=3"});
  CHECK(neither.first == "R0101 ");
  has(neither.second,
      "the world of 10 ranks is not a multiple of tensor * pipeline * context = 4 * 1 * 1 = 4, nor of expert "
      "tensor * expert * pipeline = 1 * 3 * 1 = 3");
  has(neither.second, "note: dense grid TP * CP * DP * PP = 4 * 1 * DP * 1 = 4 * DP\n");
  has(neither.second, "note: expert grid ETP * EP * EDP * PP = 1 * 3 * EDP * 1 = 3 * EDP\n");
  has(neither.second, "nearest legal dist.world_size: 12;");
  has(neither.second,
      "expert parallelism (3) takes the ranks of a pipeline stage and does not multiply into the world");
  // The dense grid alone, the experts' alone.
  CHECK(world(6, {"dist.tp=4", "dist.sp=true", "dist.etp=1", "dist.ep=2"}).first == "R0101 ");
  const auto experts = world(6, {"dist.tp=2", "dist.sp=true", "dist.etp=1", "dist.ep=4"});
  CHECK(experts.first == "R0102 ");
  has(experts.second, "= 1 * 4 * 1 = 4, though it is one of tensor * pipeline * context = 2\n");
  has(experts.second, "note: dense grid TP * CP * DP * PP = 2 * 1 * 3 * 1 = 6\n");
  has(experts.second, "note: expert grid ETP * EP * EDP * PP = 1 * 4 * EDP * 1 = 4 * EDP\n");
  has(experts.second, "nearest legal dist.world_size: 4 or 8; or dist.expert_model_parallel_size: 2");
  // A user who multiplied TP * DP * EP into the world.
  const auto multiplied =
      world(16, {"dist.tp=2", "dist.sp=true", "dist.etp=1", "dist.ep=4", "dist.dp=2", "dist.edp=2"});
  CHECK(multiplied.first == "R0103 ");
  has(multiplied.second, "note: dense grid TP * CP * DP * PP = 2 * 1 * 2 * 1 = 4\n");
  has(multiplied.second, "note: expert grid ETP * EP * EDP * PP = 1 * 4 * 2 * 1 = 8\n");
  has(multiplied.second,
      "expert parallelism (4) takes the ranks of a pipeline stage and does not multiply into the world: set "
      "dist.world_size=4, or leave dist.data_parallel_size unset");
  // A dense model has one grid.
  Request request;
  request.recipe = "quickstart";
  request.ranks = 3;
  request.overrides = {Override::token("dist.tp=2")};
  const auto dense = resolve(request);
  CHECK(render(dense.diagnostics, dense.sources).find("expert") == std::string::npos);
}

TEST_CASE(
    "one cause, one message: what a missing file or an ambiguous field would have said is not missing") {
  const auto codes = [](const std::string& recipe, const std::vector<std::string>& overrides) {
    Request request;
    request.recipe = recipe;
    for (const auto& text : overrides) request.overrides.push_back(Override::token(text));
    const auto r = resolve(request);
    std::string text;
    for (const auto& d : r.diagnostics)
      if (d.level == Level::error) text += d.code + " ";
    return text;
  };
  CHECK(codes("quickstart", {"model=no-such-preset"}) == "C0505 ");
  CHECK(codes("quickstart", {"peft=None"}) == "C0505 ");  // with the word that would do, null
  CHECK(codes("quickstart", {"peft=null"}).empty());
  CHECK(codes("quickstart", {"model=no-such-preset", "train.train_iters=x"}) == "C0505 C0201 ");
  CHECK(codes("quickstart", {"dist.tp=2", "dist.tensor_model_parallel_size=4"}) == "C0105 ");
  CHECK(codes("quickstart", {"dist.tp=3"}) != "");
  const std::string file =
      (std::filesystem::temp_directory_path() / ("capstan_extends_" + std::to_string(getpid()) + ".yaml"))
          .string();
  for (const char* parent : {"no-such-recipe", "../outside.yaml", "[quickstart, [x]]"}) {
    CAPTURE(std::string(parent));
    std::ofstream(file) << "extends: " << parent << "\n";
    const auto found = codes(file, {});
    CHECK((found == "C0501 " || found == "C0503 "));
  }
  std::ofstream(file) << "dist: {tp: 2, tensor_model_parallel_size: 2}\nextends: quickstart\n";
  CHECK(codes(file, {}) == "C0104 ");
  std::filesystem::remove(file);
}

namespace {

Resolution of_file(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const auto directory =
      std::filesystem::temp_directory_path() / ("capstan_derived_" + std::to_string(::getpid()));
  std::filesystem::create_directories(directory);
  std::ofstream(directory / "mine.yaml") << text;
  Request request;
  request.recipe = (directory / "mine.yaml").string();
  for (const auto& one : overrides) request.overrides.push_back(Override::token(one));
  Resolution r = resolve(request);
  std::filesystem::remove_all(directory);
  return r;
}

}  // namespace

TEST_CASE("min_lr follows lr by its ratio, and a rate that is given later takes the ratio's place") {
  struct Row {
    std::vector<std::string> overrides;
    std::string min_lr, ratio;
  };
  for (const Row& row : {Row{{}, "0.0002", "0.1"},
                         {{"optimizer.lr=3e-4"}, "3.0e-05", "0.1"},  // as people write it
                         {{"optimizer.lr=3e-4", "optimizer.min_lr_ratio=25%"}, "7.5e-05", "0.25"},
                         {{"optimizer.min_lr=1e-5"}, "1.0e-05", "null"},
                         {{"optimizer.min_lr=1e-5", "optimizer.min_lr_ratio=null"}, "1.0e-05", "null"},
                         {{"optimizer.min_lr_ratio=null"}, "0", "null"},
                         {{"optimizer.min_lr=null"}, "0.0002", "0.1"}}) {
    CAPTURE(row.min_lr);
    std::vector<std::string> overrides = row.overrides;
    const auto r = resolved_pipeline(overrides);
    CHECK_MESSAGE(r.ok(), render(r.diagnostics, r.sources));
    CHECK(value(r, "optimizer.min_lr") == row.min_lr);
    CHECK(value(r, "optimizer.min_lr_ratio") == row.ratio);
  }
  // The floor of embedding and head keeps the ratio to its own peak.
  const auto decoupled = resolved_pipeline({"optimizer.decoupled_lr=1e-4"});
  CHECK(value(decoupled, "optimizer.decoupled_min_lr") == "1.0e-05");
}

TEST_CASE("min_lr and its ratio in one file agree, or are an error") {
  const std::string base = "extends: quickstart\n";
  CHECK(of_file(base + "optimizer: {lr: 1e-3, min_lr: 1e-4, min_lr_ratio: 0.1}\n").ok());
  const auto r = of_file(base + "optimizer: {lr: 1e-3, min_lr: 2e-4, min_lr_ratio: 0.1}\n");
  REQUIRE(r.diagnostics.size() == 1);
  CHECK(r.diagnostics[0].code == "C0111");
  CHECK(r.diagnostics[0].message.find("both given and disagree") != std::string::npos);
  CHECK_FALSE(resolved_pipeline({"optimizer.min_lr=1e-6", "optimizer.min_lr_ratio=0.5"}).ok());
}

TEST_CASE("a resolved recipe omits a preset's values that another field switches off") {
  const auto r = resolved_pipeline({"model=llama3.2-1b", "model.rope_scaling=false"});
  REQUIRE_MESSAGE(r.ok(), render(r.diagnostics, r.sources));
  const std::string text = resolved_recipe(r);
  CHECK(text.find("\n  rope_scaling_factor: ") == std::string::npos);
  const auto again = of_file(text);
  CHECK_MESSAGE(again.ok(), render(again.diagnostics, again.sources));
  CHECK(value(again, "model.rope_scaling") == "false");
  CHECK(resolved_recipe(resolved_pipeline({"model=llama3.2-1b"})).find("\n  rope_scaling_factor: 32  ") !=
        std::string::npos);
}

TEST_CASE("a resolved recipe keeps the ratio, so that another lr still moves min_lr") {
  const auto r = resolved_pipeline({});
  const std::string text = resolved_recipe(r);
  CHECK(text.find("\n  min_lr_ratio: 0.1  ") != std::string::npos);
  CHECK(text.find("\n  # min_lr: 0.0002  ") != std::string::npos);
  const auto again = of_file(text, {"optimizer.lr=1e-4"});
  CHECK_MESSAGE(again.ok(), render(again.diagnostics, again.sources));
  CHECK(value(again, "optimizer.min_lr") == "1.0e-05");
  CHECK(value(of_file(text), "optimizer.min_lr") == "0.0002");
}
