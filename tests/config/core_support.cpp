#include "core_support.hpp"

#include <unistd.h>

#include <fstream>

#include "config/core/emit.hpp"

namespace capstan::config::testing {

void describe(Section<Source>& s) {
  s.id("name");
  s.field("name", &Source::name).doc("of the source").required();
  s.field("weight", &Source::weight).doc("its share").above(0);
  s.field("epochs", &Source::epochs).doc("passes").min(1);
}
void describe(Section<ModelSection>& s) {
  s.doc("the model");
  s.field("hidden_size", &ModelSection::hidden_size).doc("width").min(1).alias("n_embd");
  s.field("ffn_hidden_size", &ModelSection::ffn_hidden_size).doc("width of the MLP").min(1);
  s.field("num_heads", &ModelSection::num_heads).doc("heads").min(1).known_as("n_head");
  s.field("seq_length", &ModelSection::seq_length)
      .doc("tokens of a sample")
      .tokens()
      .min(1)
      .alias("dataset.seq_length");
  s.field("dropout", &ModelSection::dropout).doc("dropout").fraction();
  s.field("norm", &ModelSection::norm).doc("kind of norm").unsupported("RMSNorm", [](const Value& v) {
    return v.text == "RMSNorm";
  });
  s.field("dtype", &ModelSection::dtype).doc("element type");
  s.field("experts", &ModelSection::experts).doc("number of experts").min(2);
  s.field("topk", &ModelSection::topk)
      .doc("experts of a token")
      .one_of({1, 2, 4})
      .used_when<Root>("`model.experts` is set", [](const Root& c) { return c.model.experts.has_value(); });
  s.field("capacity_log", &ModelSection::capacity_log)
      .doc("logs capacity")
      .effect(Effect::log)
      .used_when<Root>("`model.experts` is set", [](const Root& c) { return c.model.experts.has_value(); });
  s.field("mask", &ModelSection::mask).doc("bits").hex();
}
void describe(Section<TrainSection>& s) {
  s.doc("the loop");
  s.field("iters", &TrainSection::iters)
      .doc("steps")
      .count()
      .min(1)
      .unit("iterations")
      .alias("steps")
      .renamed_from("max_steps");
  s.field("global_batch", &TrainSection::global_batch)
      .doc("samples of a step")
      .count()
      .min(1)
      .known_as("batch_size");
  s.field("micro_batch", &TrainSection::micro_batch)
      .doc("samples at once")
      .min(1)
      .known_as("per_device_train_batch_size");
  s.field("note", &TrainSection::note).doc("free text").effect(Effect::log);
  s.field("title", &TrainSection::title).doc("free text").effect(Effect::log);
  s.field("skip", &TrainSection::skip).doc("steps left out").scalar_ok();
  s.field("tags", &TrainSection::tags).doc("labels").effect(Effect::log);
  s.field("verbose", &TrainSection::verbose).doc("say more").effect(Effect::log).deprecated("use -v");
  s.field("timeout", &TrainSection::timeout).doc("of a collective").effect(Effect::io);
  s.field("minutes", &TrainSection::minutes).doc("of the run").effect(Effect::io).duration_unit("m");
  s.field("buffer", &TrainSection::buffer).doc("size").effect(Effect::memory);
  s.field("save", &TrainSection::save).doc("directory").effect(Effect::io);
  s.field("load", &TrainSection::load).doc("directory").effect(Effect::io);
  s.field("limit", &TrainSection::limit).doc("may be infinite").allow_inf().allow_nan();
  s.field("env", &TrainSection::env).doc("variables").effect(Effect::perf);
  s.field("modules", &TrainSection::modules).doc("names").effect(Effect::perf);
}
void describe(Section<OptSection>& s) {
  s.doc("the optimizer");
  s.field("lr", &OptSection::lr).doc("learning rate").above(0).max(10).alias("learning_rate");
  s.field("min_lr", &OptSection::min_lr).doc("its floor").min(0);
  s.field("beta", &OptSection::beta).doc("momentum").min(0).below(1);
  s.field("warmup", &OptSection::warmup).doc("share of the run").fraction();
  s.field("scale", &OptSection::scale).doc("loss scale").count();
  s.field("token", &OptSection::token).doc("of the logger").effect(Effect::log);
}
void describe(Section<DataSection>& s) {
  s.doc("the data").variants("kind");
  s.field("kind", &DataSection::kind).doc("of the data");
  s.field("path", &DataSection::path).doc("prefix").only_for({"gpt"}).effect(Effect::io);
  s.field("seed", &DataSection::seed).doc("of the order");
  s.field("blend", &DataSection::blend).doc("weights").only_for({"gpt"});
  s.field("sources", &DataSection::sources).doc("in detail").only_for({"gpt"});
}
void describe(Section<PeftSection>& s) {
  s.doc("adapters").variants("scheme");
  s.field("scheme", &PeftSection::scheme).doc("of the adapter");
  s.field("dim", &PeftSection::dim).doc("rank").min(1).alias("r");
  s.field("targets", &PeftSection::targets).doc("modules").only_for({"lora"});
}
void describe(Section<DistSection>& s) {
  s.doc("the world");
  s.field("world_size", &DistSection::world_size).doc("ranks").min(1).effect(Effect::perf);
  s.field("tensor_parallel_size", &DistSection::tensor_parallel_size)
      .doc("ranks that share a layer")
      .min(1)
      .effect(Effect::perf)
      .alias("tp")
      .alias("model.tensor_parallel_size")
      .alias("parallel.tp");
  s.field("data_parallel_size", &DistSection::data_parallel_size).doc("replicas").effect(Effect::perf);
}

static void derive_ffn(Root& c) {
  c.model.ffn_hidden_size = 4 * c.model.hidden_size;
}
static void derive_dp(Root& c) {
  if (c.dist.tensor_parallel_size > 0)
    c.dist.data_parallel_size = c.dist.world_size / c.dist.tensor_parallel_size;
}
static void check_heads(const Root& c, RuleReport& report) {
  if (c.model.hidden_size % c.model.num_heads != 0)
    report.error("`model.hidden_size` is not a multiple of `model.num_heads`")
        .at("model.num_heads")
        .help("nearest legal values: 4 and 8");
}
static void check_batch(const Root& c, RuleReport& report) {
  const int64_t product = c.train.micro_batch * c.dist.data_parallel_size.value_or(1);
  if (product > 0 && c.train.global_batch % product != 0)
    report.error("the global batch does not divide")
        .operand("micro_batch * data_parallel_size", std::to_string(product));
  if (c.train.micro_batch > 64) report.warning("a large micro batch").at("train.micro_batch");
}

const Schema& test_schema() {
  static const Schema* schema = [] {
    auto* s = new Schema;
    s->root<Root>([](Section<Root>& root) {
      root.field("name", &Root::name).doc("of the recipe").effect(Effect::io);
      root.field("description", &Root::description).doc("one line").effect(Effect::log);
    });
    s->section("model", &Root::model);
    s->section("train", &Root::train);
    s->section("optimizer", &Root::optimizer);
    s->section("dataset", &Root::dataset);
    s->section("peft", &Root::peft);
    s->section("dist", &Root::dist);
    s->ranks_path("dist.world_size");
    s->derive("model.ffn_hidden_size", "4 * model.hidden_size", derive_ffn);
    s->derive("dist.data_parallel_size", "dist.world_size / dist.tensor_parallel_size", derive_dp);
    s->rule({"T0001", "heads_divide", "heads divide the width", {"model.hidden_size", "model.num_heads"}},
            check_heads);
    s->rule({"T0002",
             "batch_divides",
             "the batch divides",
             {"train.global_batch", "train.micro_batch", "dist.data_parallel_size"}},
            check_batch);
    s->finish();
    return s;
  }();
  return *schema;
}

const Library& test_library() {
  static constexpr LibraryFile files[] = {
      {"configs/dataset/gpt.yaml", "kind: gpt\nseed: 5\n"},
      {"configs/dataset/mock.yaml", "kind: mock\n"},
      {"configs/model/base.yaml", "# a small model\nhidden_size: 256\nnum_heads: 8\n"},
      {"configs/model/circle.yaml", "extends: ring\n"},
      {"configs/model/odd.yaml", "num_heads: 8\noptimizer.lr: 0.25\ntrain.tags: [odd]\n"},
      {"configs/model/ring.yaml", "extends: circle\n"},
      {"configs/model/self.yaml", "extends: self\n"},
      {"configs/model/wide.yaml", "extends: base\nhidden_size: 512\noptimizer.lr: 0.5\n"},
      {"configs/optimizer/fast.yaml", "lr: 0.1\nbeta: 0.5\n"},
      {"configs/peft/dora.yaml", "scheme: dora\ndim: 4\n"},
      {"configs/peft/lora.yaml", "scheme: lora\ndim: 16\ntargets: [linear_qkv, linear_proj]\n"},
      {"recipes/base.yaml", "# The base recipe.\nmodel: base\ntrain:\n  iters: 1000\n  global_batch: 16\n"},
      {"recipes/child.yaml",
       "# yaml-language-server: $schema=x\n# A child.\nextends: base\ntrain:\n  iters: 2000\n"},
      {"recipes/expert.yaml", "# Eight experts.\nmodel:\n  experts: 8\n  topk: 4\n  capacity_log: 4\n"},
      {"recipes/loop.yaml", "extends: loop2\n"},
      {"recipes/loop2.yaml", "extends: loop\n"},
  };
  static const Library library(files, {});
  return library;
}

std::string Outcome::codes() const {
  std::string out;
  for (const auto& diagnostic : diagnostics)
    if (diagnostic.level == Level::error) out += (out.empty() ? "" : " ") + diagnostic.code;
  return out;
}
std::string Outcome::all() const {
  return render(diagnostics, sources, {DiagnosticFormat::compact, false});
}
const Diagnostic* Outcome::first(std::string_view code) const {
  for (const auto& diagnostic : diagnostics)
    if (diagnostic.code == code) return &diagnostic;
  return nullptr;
}
bool Outcome::says(std::string_view text) const {
  return render(diagnostics, sources).find(text) != std::string::npos;
}
Value Outcome::value(const std::string& path) const {
  return test_schema().load(&config, *test_schema().find_field(path));
}
std::string Outcome::text(const std::string& path) const {
  return yaml_inline(*test_schema().find_field(path)->type, value(path));
}

Workspace::Workspace() {
  static int number = 0;
  directory_ = std::filesystem::temp_directory_path() /
               ("capstan-config-" + std::to_string(getpid()) + "-" + std::to_string(number++));
  std::filesystem::create_directories(directory_);
}
Workspace::~Workspace() {
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}
std::string Workspace::write(const std::string& name, std::string_view content) const {
  const auto path = directory_ / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
  return path.string();
}
Outcome Workspace::resolve(const Request& request) const {
  Outcome outcome;
  static_cast<Resolved&>(outcome) = resolve_into(test_schema(), test_library(), &outcome.config, request);
  return outcome;
}
Outcome Workspace::resolve(const std::string& recipe, const std::vector<std::string>& overrides,
                           std::optional<int64_t> ranks) const {
  Request request;
  request.recipe = recipe;
  request.ranks = ranks;
  request.now = 1'795'240'000;  // 2026-11-21T05:46:40Z
  for (const auto& override : overrides) request.overrides.push_back(Override::token(override));
  return resolve(request);
}
Outcome Workspace::text(std::string_view content, const std::vector<std::string>& overrides) const {
  return resolve(write("r.yaml", content), overrides);
}

Outcome with_override(const std::string& override) {
  static const Workspace workspace;
  return workspace.text("name: x\n", {override});
}

}  // namespace capstan::config::testing
