// Adapters of PEFT in training: logits, gradients and losses of a few steps equal PEFT's own
// (make_adapters.py), on one rank and on several; what is trained on one layout is saved alike from another.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>

#include "base/file.hpp"
#include "checkpoint/reader.hpp"
#include "config/tools/show.hpp"
#include "formats/peft_mapping.hpp"
#include "support/fixture.hpp"
#include "support/paths.hpp"
#include "support/saves.hpp"
#include "support/worlds.hpp"
#include "train/adapters/adapters.hpp"
#include "train/adapters/peft_files.hpp"
#include "train/adapters/stored_adapters.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
namespace fs = std::filesystem;
using test::world;

namespace {

const fs::path kHere = fs::path(capstan::test::kSourceDirectory) / "tests/formats";
constexpr int64_t kSequence = 13;

struct Case {
  const char *adapter, *base;
  config::PeftScheme scheme;
  // True if all modules have one rank and one scale, so that the adapter can be trained on.
  bool trains = true;
};
constexpr Case kCases[] = {{"lora", "llama", config::PeftScheme::canonical_lora},
                           {"rslora_all", "llama", config::PeftScheme::canonical_lora},
                           {"rslora", "llama", config::PeftScheme::canonical_lora, false},
                           {"dora", "llama", config::PeftScheme::canonical_dora},
                           {"dora_part", "llama", config::PeftScheme::canonical_dora},
                           {"phi3", "phi3", config::PeftScheme::dora},
                           {"gpt_neox", "gpt_neox", config::PeftScheme::lora},
                           {"mixtral", "mixtral", config::PeftScheme::canonical_lora},
                           {"gpt2", "gpt2", config::PeftScheme::lora}};

std::string base_of(const Case& c) {
  return "hf:" + (kHere / "families" / c.base).string();
}
std::string adapter_of(const Case& c) {
  return (kHere / "adapters" / c.adapter).string();
}
test::Fixture truth_of(const Case& c) {
  return test::Fixture(adapter_of(c) + "/expected.safetensors");
}

// The fixture's rows, in their order, and again: a loader reads ahead.
class Rows final : public data::Dataset {
 public:
  explicit Rows(std::vector<int32_t> tokens) : tokens_(std::move(tokens)) {}
  int64_t sequence_length() const override { return kSequence; }
  int64_t samples() const override { return static_cast<int64_t>(tokens_.size()) / (kSequence + 1); }
  int64_t epoch_samples() const override { return samples(); }
  void row(int64_t number, const data::RowView& out) const override {
    const int64_t begin = number % samples() * (kSequence + 1);
    data::fill_row(std::span(tokens_).subspan(static_cast<size_t>(begin), kSequence + 1), {}, out);
  }
  std::string fingerprint() const override { return "rows"; }

 private:
  std::vector<int32_t> tokens_;
};

config::Resolution recipe_of(const Case& c, int64_t ranks, std::vector<std::string> more) {
  const auto external = formats::ExternalModel::open(base_of(c));
  BaseModel base = BaseModel::open(base_of(c));
  const auto adapters = open_adapters(adapter_of(c), base, external->model());
  for (const std::string& text : adapter_overrides(adapters.peft)) more.push_back(text);
  // The fixture's class adds no loss of its routers.
  if (external->model().num_moe_experts)
    more.insert(more.end(), {"model.moe_router_load_balancing_type=none", "model.moe_aux_loss_coeff=0"});
  for (const std::string& text :
       {"peft.adapter=" + adapter_of(c), "checkpoint.pretrained_checkpoint=" + base_of(c),
        "model.seq_length=" + std::to_string(kSequence), std::string("train.global_batch_size=2"),
        std::string("train.train_iters=10"), std::string("train.threads=1"), std::string("optimizer.lr=3e-3"),
        std::string("optimizer.weight_decay=0.1"), std::string("optimizer.clip_grad=0"),
        "model.max_position_embeddings=" + std::to_string(*external->model().max_position_embeddings),
        std::string("optimizer.adam_beta2=0.999"), std::string("scheduler.lr_decay_style=constant"),
        std::string("scheduler.lr_warmup_iters=0"), "dist.world_size=" + std::to_string(ranks),
        std::string("model.hidden_dropout=0"), std::string("model.attention_dropout=0")})
    more.push_back(text);
  config::Request request;
  for (const std::string& text : more) request.overrides.push_back(config::Override::token(text));
  config::Resolution resolution = formats::resolve_recipe(*external, std::move(request));
  resolution.require_ok();
  return resolution;
}

struct Trained {
  std::vector<double> losses;
  fs::path checkpoint;
};
Trained train_steps(const Case& c, comm::World& on, const config::Resolution& recipe, int64_t steps,
                    const fs::path& root) {
  const config::Config& config = recipe.config;
  StepRunner runner(config, on);
  runner.initialize();
  const BaseWeights base = load_base(config, runner.store(), "", on.communicator());
  begin_adapters(config, runner.device(), runner.store(), base);
  data::Loader loader(std::make_shared<Rows>(truth_of(c).get<int32_t>("tokens")), runner.loader_options());
  StepTimers timers;
  Trained result;
  while (runner.state().step < steps) {
    timers.start_step();
    result.losses.push_back(runner.train_step(loader, timers).loss);
  }
  SavePlan plan;
  plan.root = root;
  plan.base = base.hash;
  plan.recipe = config::resolved_recipe(recipe);
  // Its config.json determines the names of modules in PEFT.
  plan.assets = BaseModel::open(base_of(c)).assets();
  if (on.rank() == 0) fs::create_directories(root);
  on.communicator().barrier();
  result.checkpoint = save_state(on, plan, runner.state(), runner.store(), runner.optimizer());
  return result;
}

// The first moments under the names of the parameters.
class Moments final : public checkpoint::TensorSource {
 public:
  explicit Moments(checkpoint::TensorSource& from) : from_(from) {}
  std::string description() const override { return from_.description(); }
  std::vector<std::string> names() const override { return {}; }
  const checkpoint::TensorInfo* find(std::string_view name) const override { return from_.find(of(name)); }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override {
    from_.read(of(name), dtype, wanted, out);
  }

 private:
  static std::string of(std::string_view name) { return "optimizer.exp_avg." + std::string(name); }
  checkpoint::TensorSource& from_;
};

double largest(const std::vector<float>& values) {
  double most = 0;
  for (const float value : values) most = std::max(most, std::abs(static_cast<double>(value)));
  return most;
}
// Largest difference relative to `scale`, if it is given, and otherwise to the largest value of b.
double apart(const std::vector<float>& a, const std::vector<float>& b, double factor = 1, double scale = 0) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i]) * factor - static_cast<double>(b[i])));
  return most / (scale > 0 ? scale : std::max(largest(b), 1e-3));
}

}  // namespace

TEST_CASE("logits with an adapter are PEFT's") {
  if (world().size() > 2) return;
  for (const Case& c : kCases) {
    CAPTURE(c.adapter);
    const StoredRecipe stored =
        stored_recipe(base_of(c),
                      {config::Override::token("train.threads=1"),
                       config::Override::token("dist.tp=" + std::to_string(world().size()))},
                      world().size());
    stored.resolution.require_ok();
    LoadedModel model(stored.checkpoint, stored.resolution.config, world(), adapter_of(c));
    REQUIRE(model.config().peft);
    CHECK(model.config().peft->scheme == c.scheme);
    const test::Fixture truth = truth_of(c);
    const auto tokens = truth.get<int32_t>("tokens");
    const auto logits = truth.get<float>("logits");
    const auto vocabulary = static_cast<size_t>(truth.shape("logits")[2]);
    for (size_t row = 0; row < 2; ++row) {
      auto cache = model.make_cache(kSequence);
      for (size_t i = 0; i < kSequence; ++i) {
        const auto got = model.next_logits({&tokens[row * (kSequence + 1) + i], 1}, cache);
        const size_t first = (row * kSequence + i) * vocabulary;
        const std::vector<float> expected(logits.begin() + static_cast<int64_t>(first),
                                          logits.begin() + static_cast<int64_t>(first + vocabulary));
        REQUIRE(apart(got, expected) < 1e-5);
      }
    }
  }
}

TEST_CASE("rank 0 reads an external base for its hash, and every rank knows it") {
  const Case& c = kCases[0];
  BaseModel alone = BaseModel::open(base_of(c)), shared = BaseModel::open(base_of(c));
  shared.share_hash(world().communicator());
  CHECK(shared.hash() == alone.hash());
}

TEST_CASE("gradients and ten steps of AdamW are PEFT's") {
  if (world().size() > 1) return;
  const test::SharedDirectory scratch;
  for (const Case& c : kCases) {
    if (!c.trains) continue;
    CAPTURE(c.adapter);
    const test::Fixture truth = truth_of(c);
    const auto recipe = recipe_of(c, 1, {});
    const Trained one = train_steps(c, world(), recipe, 1, scratch.path() / c.adapter / "one");
    CHECK(one.losses[0] == doctest::Approx(truth.get<float>("loss")[0]).epsilon(1e-5));
    auto reader = checkpoint::Reader::open(one.checkpoint, checkpoint::Verification::content);
    Moments moments(reader);
    const config::ModelConfig& model = recipe.config.model;
    BaseModel base = BaseModel::open(base_of(c));
    const auto names = formats::class_names(model, base.assets());
    const auto gradients =
        formats::to_peft(formats::read_adapters(moments, *recipe.config.peft, model), model, names, "");
    // Gradients behind a nearly one-hot softmax are small differences of large numbers.
    double scale = 0;
    for (const std::string& name : truth.names("gradient."))
      scale = std::max(scale, largest(truth.get<float>("gradient." + name)));
    size_t compared = 0;
    for (const auto& module : gradients.modules) {
      CAPTURE(module.module);
      const auto check = [&](const std::string& name, const std::vector<float>& got) {
        if (got.empty()) return;
        ++compared;
        CAPTURE(name);
        const auto expected = truth.get<float>("gradient." + module.module + name);
        CHECK(apart(got, expected, 10, scale) < 1e-5);  // 1 - beta1 = 0.1
        CHECK(apart(got, expected, 10) < 5e-5);
      };
      check(".lora_A", module.a);
      check(".lora_B", module.b);
      check(".lora_magnitude_vector", module.magnitude);
    }
    CHECK(compared == truth.names("gradient.").size());

    for (const double plus : {1.0, 4.0}) {
      CAPTURE(plus);
      std::vector<std::string> more;
      if (plus != 1) more.push_back("peft.lora_plus_ratio=" + std::to_string(plus));
      const Trained ten = train_steps(c, world(), recipe_of(c, 1, more), 10,
                                      scratch.path() / c.adapter / ("ten" + std::to_string(plus)));
      const auto losses = truth.get<float>(plus == 1 ? "losses" : "losses_plus");
      for (size_t i = 0; i < losses.size(); ++i)
        CHECK(ten.losses[i] == doctest::Approx(losses[i]).epsilon(1e-5));
    }
  }
}

TEST_CASE("an adapter trained on tensor and pipeline ranks is one rank's, and is saved again byte by byte") {
  if (world().size() != 4) return;
  const test::SharedDirectory scratch;
  for (const Case& c : kCases) {
    if (!c.trains) continue;
    CAPTURE(c.adapter);
    const fs::path root = scratch.path() / c.adapter;
    const Trained many =
        train_steps(c, world(), recipe_of(c, 4, {"dist.tp=2", "dist.pp=2"}), 5, root / "many");
    if (world().rank() == 0) {
      const auto alone = comm::World::single_process();
      const auto recipe = recipe_of(c, 1, {});
      const Trained one = train_steps(c, *alone, recipe, 5, root / "one");
      const auto losses = truth_of(c).get<float>("losses");
      for (size_t i = 0; i < 5; ++i) {
        CHECK(many.losses[i] == doctest::Approx(one.losses[i]).epsilon(1e-5));
        CHECK(many.losses[i] == doctest::Approx(losses[i]).epsilon(1e-5));
      }
      auto ours = checkpoint::Reader::open(many.checkpoint, checkpoint::Verification::content),
           theirs = checkpoint::Reader::open(one.checkpoint, checkpoint::Verification::content);
      // Read on one rank, saved again.
      StepRunner runner(recipe.config, *alone);
      runner.initialize();
      runner.state() = load_state(ours, runner.store(), &runner.optimizer());
      SavePlan plan;
      plan.root = root / "again";
      plan.base = train::stored_base_hash(ours);
      plan.recipe = config::resolved_recipe(recipe);
      plan.assets = BaseModel::open(base_of(c)).assets();
      fs::create_directories(plan.root);
      auto again = checkpoint::Reader::open(
          save_state(*alone, plan, runner.state(), runner.store(), runner.optimizer()),
          checkpoint::Verification::content);
      REQUIRE(again.names() == ours.names());
      REQUIRE(theirs.names() == ours.names());
      for (const std::string& name : ours.names()) {
        CAPTURE(name);
        const auto values = [&](checkpoint::Reader& reader) {
          std::vector<float> result(static_cast<size_t>(reader.at(name).shape.elements()));
          reader.read_all(name, DType::f32, std::as_writable_bytes(std::span(result)));
          return result;
        };
        CHECK(values(again) == values(ours));
        if (!name.starts_with("optimizer.")) CHECK(apart(values(ours), values(theirs)) < 1e-5);
      }
      // The values also stay the same in files of PEFT that are written, read and written again.
      write_peft_files(many.checkpoint.string(), root / "peft", "base");
      write_peft_files(again.directory().string(), root / "peft-again", "base");
      read_peft_files((root / "peft").string(), root / "back", base_of(c));
      write_peft_files((root / "back").string(), root / "peft-back", "base");
      for (const char* other : {"peft-again", "peft-back"})
        for (const char* file : {"adapter_config.json", "adapter_model.safetensors"})
          CHECK(read_file(root / "peft" / file) == read_file(root / other / file));
    }
    world().communicator().barrier();
  }
}
