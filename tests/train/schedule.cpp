// Fields that a resumed run takes from its recipe: the schedule is the checkpoint's, unless the recipe sets
// it; fields that say where a run begins are refused.
#include <doctest/doctest.h>

#include <fstream>

#include "base/error.hpp"
#include "base/json.hpp"
#include "runs.hpp"
#include "support/errors.hpp"
#include "support/temporary_directory.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/run_schedule.hpp"
#include "train/trainer/schedule_setup.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::test::error_of;
using capstan::test::holds;
using capstan::test::TemporaryDirectory;
using capstan::testing::Report;
using capstan::testing::resolve_recipe;
using capstan::testing::run_options;
namespace fs = std::filesystem;

namespace {

const char* const kRecipe = R"(
name: tiny
model: {num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, seq_length: 8,
        vocab_size: 32, make_vocab_size_divisible_by: 1, hidden_dropout: 0.0, attention_dropout: 0.0}
train: {micro_batch_size: 2, global_batch_size: 4, train_iters: 10, threads: 1, device: cpu}
optimizer: {lr: 1e-2, min_lr: 1e-3}
scheduler: {lr_decay_style: cosine, lr_warmup_fraction: 0.2}
dataset: {kind: mock}
logger: {log_interval: 1, tensorboard: false}
)";

struct Bench {
  TemporaryDirectory root;
  Report said;
  Bench() { std::ofstream(root.path() / "tiny.yaml") << kRecipe; }

  config::Resolution resolve(const std::vector<std::string>& overrides,
                             const std::string& recipe = "tiny.yaml") const {
    auto resolution = resolve_recipe(root.path() / recipe, overrides);
    resolution.require_ok();
    return resolution;
  }
  Outcome train(const std::string& run, Resume resume, const std::vector<std::string>& overrides,
                const std::string& recipe = "tiny.yaml") {
    const config::Resolution resolution = resolve(overrides, recipe);
    const RunOptions options = run_options(resolution, root.path() / run, resume, overrides);
    said = {};
    const auto world = comm::World::single_process();
    return train::train(resolution.config, *world, options, said);
  }
  std::vector<double> rates(const std::string& run) const {
    std::vector<double> rates;
    records::read_metrics(root.path() / run / "metrics.jsonl", [&](const records::ReadRow& row) {
      if (row.event.empty()) rates.push_back(row.number("learning_rate"));
    });
    return rates;
  }
  // The learning rates of `iters` steps by the recipe with these overrides.
  std::vector<double> curve(int64_t iters, const std::vector<std::string>& overrides,
                            const std::string& recipe = "tiny.yaml") const {
    const auto schedule = make_schedule(resolve(overrides, recipe).config, false);
    std::vector<double> rates;
    for (int64_t step = 0; step < iters; ++step) rates.push_back(schedule.learning_rate(4 * step));
    return rates;
  }
};

}  // namespace

TEST_CASE("a longer train_iters does not move the learning rate, until the recipe says so") {
  Bench b;
  b.train("a", Resume::no, {});
  const auto held = b.curve(14, {});
  CHECK(b.rates("a") == std::vector(held.begin(), held.begin() + 10));
  fs::copy(b.root.path() / "a", b.root.path() / "b", fs::copy_options::recursive);
  fs::copy(b.root.path() / "a", b.root.path() / "c", fs::copy_options::recursive);

  b.train("a", Resume::existing, {"train.train_iters=14"});
  CHECK(b.rates("a") == held);  // the floor, after the decay
  CHECK(held.back() == 1e-3);
  CHECK(holds(b.said.all,
              "schedule of the checkpoint: cosine, learning rate 0.01 to 0.001, warm-up 2 steps, "
              "decay 10 steps"));
  CHECK(
      holds(b.said.all, "schedule kept: scheduler.lr_decay_iters: the checkpoint's 10 steps, not 14 steps"));
  CHECK(holds(b.said.all, "warning: the learning rate reaches its floor, 0.001, at step 10"));
  CHECK(holds(b.said.all, "scheduler.lr_decay_iters=14"));
  // The recipe of the run directory says what the run follows: a new run of it has the same curve.
  CHECK(b.curve(14, {}, "a/recipe.yaml") == held);
  b.train("new", Resume::no, {}, "a/recipe.yaml");
  CHECK(b.rates("new") == held);
  // Once more, by the recipe that was given first.
  b.train("a", Resume::existing, {"train.train_iters=15"});
  CHECK(b.rates("a").back() == 1e-3);

  // So does the run's own recipe.yaml.
  b.train("a", Resume::existing, {"train.train_iters=17"}, "a/recipe.yaml");
  CHECK(b.rates("a").back() == 1e-3);
  CHECK(b.rates("a").size() == 17);

  // A field of the schedule, given on the command line, is taken alone: the warm-up stays.
  b.train("b", Resume::existing, {"train.train_iters=14", "scheduler.lr_decay_iters=14"});
  auto stretched = b.curve(14, {"train.train_iters=14", "scheduler.lr_decay_iters=14",
                                "scheduler.lr_warmup_fraction=null", "scheduler.lr_warmup_iters=2"});
  std::copy(held.begin(), held.begin() + 10, stretched.begin());
  CHECK(b.rates("b") == stretched);
  CHECK(holds(b.said.all, "schedule changed: scheduler.lr_decay_iters: 10 steps -> 14 steps"));
  CHECK(b.said.all.find("warning: the learning rate") == std::string::npos);
  // The warm-up is no longer the fraction of the decay that the recipe gives.
  const auto recorded = b.resolve({}, "b/recipe.yaml").config.scheduler;
  CHECK(recorded.lr_warmup_iters == 2);
  CHECK(!recorded.lr_warmup_fraction);
  fs::copy(b.root.path() / "b", b.root.path() / "e", fs::copy_options::recursive);
  b.train("e", Resume::existing, {"train.train_iters=16"}, "e/recipe.yaml");
  CHECK(std::equal(stretched.begin(), stretched.end(), b.rates("e").begin()));
  CHECK(b.rates("e").back() == 1e-3);

  b.train("c", Resume::existing, {"train.train_iters=20", "scheduler.override_opt_param_scheduler=true"});
  auto own = b.curve(20, {"train.train_iters=20"});
  std::copy(held.begin(), held.begin() + 10, own.begin());
  CHECK(b.rates("c") == own);
  CHECK(holds(b.said.all, "schedule of this recipe (scheduler.override_opt_param_scheduler)"));
}

TEST_CASE("the recipe of a resumed run resolves and says the schedule that the run follows") {
  const std::vector<std::vector<std::string>> starts{
      {"scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=4"},
      {"scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_fraction=0.4",
       "scheduler.lr_wsd_decay_style=linear", "scheduler.lr_warmup_init=1e-4"},
      {"scheduler.lr_decay_style=linear", "optimizer.lr=2e-2", "optimizer.min_lr=1e-4"},
      {"scheduler.lr_decay_style=constant"},
      {"optimizer.decoupled_lr=3e-3", "optimizer.decoupled_min_lr=1e-4"},
      {"scheduler.weight_decay_incr_style=linear", "scheduler.start_weight_decay=0.01",
       "scheduler.end_weight_decay=0.2"}};
  for (const auto& start : starts) {
    CAPTURE(start.front());
    Bench b;
    b.train("a", Resume::no, start);
    b.train("a", Resume::existing, {"train.train_iters=14"});
    CHECK(b.curve(14, {}, "a/recipe.yaml") == b.rates("a"));
    const auto recorded = b.resolve({}, "a/recipe.yaml");
    REQUIRE(recorded.ok());
    const auto& o = recorded.config.optimizer;
    CHECK(o.decoupled_lr.has_value() == start.front().starts_with("optimizer.decoupled_lr"));
    if (start.front().starts_with("scheduler.weight_decay"))
      CHECK(recorded.config.scheduler.end_weight_decay == 0.2);
    // The checkpoint that carries this recipe is resumed once more, and with another style.
    b.train("a", Resume::existing, {"train.train_iters=16"});
    b.train("a", Resume::existing, {"train.train_iters=18", "scheduler.lr_decay_style=constant"});
    b.train("a", Resume::existing, {"train.train_iters=20"});
    CHECK(b.rates("a").size() == 20);
  }
}

TEST_CASE("peak and floor: refused where they are given anew, kept where they are left out or asked for") {
  Bench b;
  const std::vector<std::string> begun = {"optimizer.lr=2e-2", "scheduler.lr_decay_style=linear",
                                          "train.exit_interval=4"};
  b.train("a", Resume::no, begun);
  const auto curve = b.curve(10, begun);
  const std::string refused = error_of([&] { b.train("a", Resume::existing, {"optimizer.lr=3e-2"}); });
  CHECK(holds(refused, "optimizer.lr: 0.02 -> 0.03"));
  CHECK(holds(refused, "use_checkpoint_opt_param_scheduler"));
  fs::copy(b.root.path() / "a", b.root.path() / "b", fs::copy_options::recursive);
  b.train("a", Resume::existing, {"optimizer.lr=3e-2", "scheduler.use_checkpoint_opt_param_scheduler=true"});
  CHECK(b.rates("a") == curve);
  // Values of the first command line that this one leaves out still apply, including the decay style.
  b.train("b", Resume::existing, {});
  CHECK(b.rates("b") == curve);
}

TEST_CASE("a floor that is a ratio follows the peak of the run, and another ratio is refused") {
  Bench b;
  const std::vector<std::string> begun = {"optimizer.lr=2e-2", "optimizer.min_lr_ratio=0.5",
                                          "train.exit_interval=4"};
  b.train("a", Resume::no, begun);
  CHECK(holds(error_of([&] { b.train("a", Resume::existing, {"optimizer.min_lr_ratio=0.25"}); }),
              "optimizer.min_lr (by `optimizer.min_lr_ratio`): 0.01 -> "));
  b.train("a", Resume::existing, {"optimizer.min_lr_ratio=0.5"});  // without the peak of the first start
  CHECK(b.rates("a") == b.curve(10, begun));
}

TEST_CASE("a resume refuses the fields that say where a run begins, and keeps the optimizer state") {
  Bench b;
  b.train("other", Resume::no, {"train.train_iters=4", "checkpoint.save_interval=2"});
  const std::string load = "checkpoint.load=" + (b.root.path() / "other").string(),
                    weights = "checkpoint.pretrained_checkpoint=" + (b.root.path() / "other").string();
  const std::vector<std::string> fresh = {load, "checkpoint.load_optim=false", "train.train_iters=8"};
  b.train("full", Resume::no, fresh);
  auto begin = fresh;
  begin.emplace_back("train.exit_interval=6");
  b.train("parts", Resume::no, begin);
  b.train("plain", Resume::no, {"train.exit_interval=2", "train.train_iters=8"});

  const auto refused = [&](const std::vector<std::string>& overrides) {
    return error_of([&] { b.train("plain", Resume::existing, overrides); });
  };
  const std::string why =
      "the run continues from its own checkpoint, with its optimizer state, and does not read";
  for (const std::vector<std::string>& overrides : {std::vector{load},
                                                    {weights},
                                                    {load, "checkpoint.ckpt_step=2"},
                                                    {load, "checkpoint.load_optim=false"}}) {
    INFO(overrides.back());
    const std::string text = refused(overrides);
    CHECK(holds(text, why));
    CHECK(holds(text, "\n    " + overrides.back().substr(0, overrides.back().find('=')) + ": "));
  }
  // Without checkpoint.load the field is not read at all, and `train` says so before it starts.
  config::Resolution idle = resolve_recipe(b.root.path() / "tiny.yaml", {"checkpoint.load_optim=false"});
  CHECK(holds(error_of([&] { idle.require_ok(); }), "`checkpoint.load_optim` has no effect here"));
  // Fields of saving may change.
  b.train("plain", Resume::existing,
          {"train.train_iters=8", "checkpoint.save_interval=3", "checkpoint.save_retain_interval=3",
           "checkpoint.most_recent_k=1", "checkpoint.async_save=true", "checkpoint.save_optim=false",
           "checkpoint.save_tokenizer_assets=false"});

  // A run that began with a fresh optimizer has its moments when it continues, with its first fields or
  // without.
  fs::copy(b.root.path() / "parts", b.root.path() / "again", fs::copy_options::recursive);
  b.train("parts", Resume::existing, fresh);
  b.train("again", Resume::existing, {"train.train_iters=8"});
  const auto losses = [&](const std::string& run) {
    std::vector<double> values;
    records::read_metrics(b.root.path() / run / "metrics.jsonl", [&](const records::ReadRow& row) {
      if (row.event.empty()) values.push_back(row.number("loss"));
    });
    return values;
  };
  CHECK(losses("full").size() == 4);
  CHECK(losses("parts") == losses("full"));
  CHECK(losses("again") == losses("full"));
}

TEST_CASE("the schedule of a run in samples is told in samples, by its own fields") {
  Bench b;
  b.train("a", Resume::no, {"train.train_iters=null", "train.train_samples=44"});
  b.train("a", Resume::existing, {"train.train_iters=null", "train.train_samples=60"});
  CHECK(holds(b.said.all,
              "schedule of the checkpoint: cosine, learning rate 0.01 to 0.001, warm-up 9 samples, decay 44 "
              "samples"));
  CHECK(holds(b.said.all,
              "schedule kept: scheduler.lr_decay_samples: the checkpoint's 44 samples, not 60 samples"));
  CHECK(holds(b.said.all,
              "schedule kept: scheduler.lr_warmup_samples: the checkpoint's 9 samples, not 12 samples"));
}

TEST_CASE("a decay that is given and overruled is said to be overruled") {
  Bench b;
  b.train("a", Resume::no, {});
  b.train("a", Resume::existing,
          {"train.train_iters=14", "scheduler.lr_decay_iters=14",
           "scheduler.use_checkpoint_opt_param_scheduler=true"});
  CHECK(holds(b.said.all,
              "schedule kept: scheduler.lr_decay_iters: the checkpoint's 10 steps, not 14 steps "
              "(scheduler.use_checkpoint_opt_param_scheduler)"));
  CHECK(holds(b.said.all,
              "scheduler.use_checkpoint_opt_param_scheduler=true overrules every field of the "
              "schedule; without it, scheduler.lr_decay_iters=14 decays to the end of the run"));
  CHECK(b.rates("a") == b.curve(14, {}));
}

TEST_CASE("a checkpoint that stores no schedule has that of its recipe") {
  Bench b;
  const config::Resolution resolution = b.resolve({"scheduler.lr_decay_style=linear"});
  const auto world = comm::World::single_process();
  {
    StepRunner runner(resolution.config, *world);
    runner.initialize();
    const auto data = open_datasets(resolution.config, nullptr);
    data::Loader loader(data[0], runner.loader_options());
    StepTimers timers;
    for (int step = 0; step < 4; ++step) runner.train_step(loader, timers);
    SavePlan plan;
    plan.root = b.root.path() / "old";
    plan.recipe = recipe_record(resolution, {}, "").resolved;
    plan.version = "0.1.0";
    save_state(*world, plan, runner.state(), runner.store(), runner.optimizer());
  }
  const std::string load = "checkpoint.load=" + (b.root.path() / "old").string();
  b.train("new", Resume::no, {load, "train.train_iters=14"});
  const auto curve = b.curve(14, {"scheduler.lr_decay_style=linear"});
  // The style is the old recipe's: this one sets cosine in its file, and is taken at its word.
  CHECK(holds(b.said.all, "schedule changed: scheduler.lr_decay_style: linear -> cosine"));
  b.train("same", Resume::no, {load, "train.train_iters=14", "scheduler.lr_decay_style=linear"});
  CHECK(b.rates("same") == std::vector(curve.begin() + 4, curve.end()));
  CHECK(holds(b.said.all, "decay 10 steps"));
}

TEST_CASE("a run that is not there is an error with near names; automatic starts it") {
  Bench b;
  b.train("runs/first", Resume::automatic, {"train.train_iters=1"});
  const std::string text = error_of([&] { b.train("runs/frist", Resume::existing, {}); });
  CHECK(holds(text, "there is no run `"));
  CHECK(holds(text, "runs/first`?"));
  CHECK(!fs::exists(b.root.path() / "runs/frist"));
  CHECK(b.train("runs/first", Resume::automatic, {"train.train_iters=2"}).step == 2);
  // A run without a checkpoint begins again, and says so.
  fs::remove_all(b.root.path() / "runs/first/checkpoints");
  CHECK(b.train("runs/first", Resume::existing, {"train.train_iters=1"}).step == 1);
  CHECK(holds(b.said.all, "warning: the run has no checkpoint yet: it begins again at step 0"));
}

TEST_CASE("the stored schedule reads back as it was; a damaged one is an error") {
  Bench b;
  RunSchedule schedule =
      schedule_of(b.resolve({"optimizer.decoupled_lr=0.3", "scheduler.lr_decay_style=WSD",
                             "scheduler.lr_wsd_decay_fraction=0.3", "optimizer.weight_decay=0.07"})
                      .config,
                  {});
  schedule.from_command_line = {"optimizer.lr"};
  const std::string text = schedule_text(schedule);
  CHECK(schedule_text(parse_schedule(text, "state.json")) == text);
  const auto json = capstan::json_of(text);
  for (const auto& [key, value] : json.items()) {
    auto damaged = json;
    damaged[key] = nlohmann::json::object();
    CHECK_MESSAGE(holds(error_of([&] { parse_schedule(capstan::dump_json(damaged), "state.json"); }), key),
                  key);
  }
  CHECK(holds(error_of([&] { parse_schedule("[]", "state.json"); }), "state.json"));
}
