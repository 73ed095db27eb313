// Evaluation and generation over tensor and pipeline ranks: the tokens, texts and losses of one rank,
// whatever layout trained and whatever layout answers. Runs on any number of ranks and takes the layouts of
// that size.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "config/tools/show.hpp"
#include "support/paths.hpp"
#include "support/saves.hpp"
#include "tests/kernels/reference.hpp"
#include "tests/support/worlds.hpp"
#include "train/inference/evaluate.hpp"
#include "train/inference/generate.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/setup/stored_recipe.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
namespace fs = std::filesystem;

namespace {

using test::world;

std::vector<config::Override> words(const std::string& text) {
  std::vector<config::Override> result;
  for (const std::string_view word : split(text, ' '))
    if (!word.empty()) result.push_back(config::Override::token(std::string(word)));
  return result;
}

// Bytes as tokens, with a vocabulary that eight ranks divide.
const std::string kBytes =
    "tokenizer.tokenizer_type=byte model.vocab_size=257 model.make_vocab_size_divisible_by=8 ";

config::Resolution recipe(const std::string& name, const std::string& overrides, int64_t ranks) {
  config::Request request;
  request.recipe = std::string(capstan::test::kSourceDirectory) + "/tests/train/layouts/" + name + ".yaml";
  request.overrides = words(kBytes + overrides);
  request.ranks = ranks;
  config::Resolution resolution = config::resolve(request);
  resolution.require_ok();
  return resolution;
}

// The same on all ranks; all of them ask together the first time.
const fs::path& scratch() {
  static const fs::path path = [] {
    int64_t id = ::getpid();
    world().communicator().broadcast(&id, sizeof id, 0);
    return fs::temp_directory_path() / ("capstan-serve-" + std::to_string(id));
  }();
  return path;
}

// A few steps on `on`, whose recipe the checkpoint carries, or `stored`.
fs::path trained(const config::Resolution& resolution, comm::World& on, const std::string& name,
                 const std::string& stored = "") {
  StepRunner runner(resolution.config, on);
  runner.initialize();
  const auto data = open_datasets(resolution.config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  while (runner.state().step < 4) runner.train_step(loader, timers);
  SavePlan plan = test::plan_in(scratch() / name);
  plan.recipe = stored.empty() ? config::resolved_recipe(resolution) : stored;
  if (on.rank() == 0) fs::create_directories(plan.root);
  on.communicator().barrier();
  return save_state(on, plan, runner.state(), runner.store(), runner.optimizer());
}
fs::path trained_by_rank_0(const std::string& name, const std::string& overrides,
                           const std::string& directory, const std::string& stored = "") {
  const fs::path path = scratch() / directory;  // asked for by all
  if (world().rank() == 0) {
    const auto alone = comm::World::single_process();
    trained(recipe(name, overrides, 1), *alone, directory, stored);
  }
  world().communicator().barrier();
  return path;
}

LoadedModel loaded(const fs::path& checkpoint, const std::string& overrides, comm::World& on) {
  const StoredRecipe stored = stored_recipe(checkpoint.string(), words(overrides), on.size());
  stored.resolution.require_ok();
  return LoadedModel(stored.checkpoint, stored.resolution.config, on);
}

struct Answers {
  std::vector<int32_t> greedy;
  // Logits of every token of `greedy`.
  std::vector<float> logits;
  std::vector<double> logprobs;
  std::string likeliest, drawn;
  double loss = 0;
};
// The tokens are those that the host draws from the logits of the same tokens.
void check_draws(LoadedModel& model, const GenerateOptions& options, const std::vector<int32_t>& drawn) {
  CHECK(!drawn.empty());
  std::vector<int32_t> next = options.prompt_ids;
  auto cache = model.make_cache(static_cast<int64_t>(next.size() + drawn.size()));
  for (const int32_t id : drawn) {
    const auto logits = model.next_logits(next, cache);
    CHECK(id == reference::sampled_token({logits.begin(), logits.end()},
                                         {options.temperature, options.top_k, options.top_p, options.seed},
                                         cache.past));
    next = {id};
  }
}

Answers answers_of(LoadedModel& model, const std::string& prompt) {
  Answers result;
  const int64_t positions = *model.config().model.max_position_embeddings;
  std::vector<int32_t> next = model.tokenizer()->encode(prompt);
  auto cache = model.make_cache(positions);
  for (auto at = static_cast<int64_t>(next.size()); at < positions; ++at) {
    const auto logits = model.next_logits(next, cache);
    CHECK(cache.past == at);
    result.logits.insert(result.logits.end(), logits.begin(), logits.end());
    next = {static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
    result.greedy.push_back(next[0]);
  }
  GenerateOptions options;
  options.prompt = prompt;
  options.max_tokens = 15;
  options.stop_at_eod = false;
  options.temperature = 0;
  options.on_text = [&](const std::string& text) { result.likeliest += text; };
  generate(model, options);
  options.temperature = 0.9, options.top_p = 0.95, options.seed = 7;
  options.on_text = [&](const std::string& text) { result.drawn += text; };
  options.prompt_ids = model.tokenizer()->encode(prompt);
  const std::vector<int32_t> drawn = generate(model, options).ids;
  check_draws(model, options, drawn);
  EvalOptions evaluation;
  evaluation.text =
      "a text that is longer than the five windows of four rows that are read at once, " + prompt;
  evaluation.stride = 7;
  evaluation.per_token = [&](int32_t, double logprob) { result.logprobs.push_back(logprob); };
  result.loss = evaluate_text(model, evaluation).loss;
  return result;
}

template <class T>
void check_near(const std::vector<T>& got, const std::vector<T>& expected) {
  REQUIRE(got.size() == expected.size());
  double most = 0, apart = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(expected[i])));
    apart = std::max(apart, std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i])));
  }
  CHECK(apart <= 1e-5 * std::max(most, 1.0));
}

// On every rank: the answers of all ranks against those of one rank that holds the full model. `more`:
// overrides of both.
void check_served(const fs::path& checkpoint, const std::string& overrides, const std::string& more = "") {
  INFO(checkpoint.filename(), " served with: ", overrides, " ", more);
  const auto alone = comm::World::single_process();
  LoadedModel one = loaded(checkpoint, more, *alone);
  LoadedModel all = loaded(checkpoint, overrides + " " + more, world());
  const config::DistConfig& d = all.config().dist;
  CHECK(d.tensor_model_parallel_size * d.pipeline_model_parallel_size * d.expert_model_parallel_size ==
        world().size());
  // Rows that tensor ranks send in shares and such that they do not divide.
  for (const std::string prompt : {"four", "seven b"}) {
    const Answers expected = answers_of(one, prompt), got = answers_of(all, prompt);
    CHECK(got.greedy == expected.greedy);
    CHECK(got.likeliest == expected.likeliest);
    CHECK(got.drawn == expected.drawn);
    check_near(got.logits, expected.logits);
    check_near(got.logprobs, expected.logprobs);
    CHECK(got.loss == doctest::Approx(expected.loss).epsilon(1e-6));
    // Bitwise the same on all ranks, or they would part.
    for (const auto op : {comm::ReduceOp::min, comm::ReduceOp::max}) {
      std::vector<double> extreme(got.logits.begin(), got.logits.end());
      comm::all_reduce(world().communicator(), extreme, op);
      CHECK(std::equal(extreme.begin(), extreme.end(), got.logits.begin(),
                       [](double a, float b) { return a == static_cast<double>(b); }));
    }
  }
}

std::vector<std::string> layouts() {
  if (world().size() == 2)
    return {"dist.tp=2", "dist.pp=2", "dist.pp=2 dist.vpp=2",
            "dist.pp=2 dist.pipeline_model_parallel_layout=Ettt|tL"};
  if (world().size() == 4)  // four tensor ranks share two groups of heads
    return {"dist.tp=4", "dist.tp=2 dist.pp=2", "dist.pp=4",
            "dist.tp=2 dist.pp=2 dist.vpp=2 train.device=checked"};
  return {"", "train.device=checked"};
}

}  // namespace

TEST_CASE("a model trained on one rank generates alike on every layout") {
  for (const char* const name : {"gpt", "llama"}) {  // tied and untied heads
    const fs::path checkpoint = trained_by_rank_0(name, "", std::string("one-") + name);
    for (const std::string& layout : layouts()) check_served(checkpoint, layout);
  }
}

TEST_CASE("a model trained on several ranks generates alike on one rank and other layouts") {
  if (world().size() == 1) return;
  int number = 0;
  for (const std::string& layout : layouts()) {
    if (layout.find("checked") != std::string::npos) continue;
    const fs::path checkpoint = trained(recipe(number % 2 ? "gpt" : "llama", layout, world().size()), world(),
                                        "many" + std::to_string(number));
    ++number;
    // The model is served with the layout of its training, except for virtual and uneven stages, and with
    // another layout.
    check_served(checkpoint, "");
    check_served(checkpoint, "dist.tp=" + std::to_string(world().size()) + " dist.pp=1");
  }
}

TEST_CASE("a model with experts generates alike on one rank and on expert-parallel ranks") {
  const std::string ranks = std::to_string(world().size());
  const std::string experts = "model.num_moe_experts=4 model.moe_token_dispatcher_type=";
  const bool several = world().size() > 1;
  const auto checkpoint = [&](const std::string& dispatcher, const std::string& more) {
    const std::string overrides =
        experts + dispatcher + " train.global_batch_size=8 train.micro_batch_size=1 ";
    return trained(recipe("moe", overrides + more, world().size()), world(), dispatcher);
  };
  // Trained on expert-parallel ranks, or on data-parallel ranks that hold all experts.
  const fs::path divided = checkpoint("alltoall", several ? "dist.ep=" + ranks : "");
  check_served(divided, several ? "dist.ep=" + ranks : "");
  const fs::path full = checkpoint("allgather", "");
  check_served(full, several ? "dist.ep=" + ranks : "");
  if (world().size() == 4) check_served(divided, "dist.pp=2 dist.ep=2");
  // Where overrides keep a capacity, every rank has all tokens, and drops those that one rank drops.
  for (const std::string policy : {"probs", "position"})
    check_served(full, several ? "dist.ep=" + ranks : "",
                 "model.moe_expert_capacity_factor=0.75 model.moe_token_drop_policy=" + policy);
  if (world().size() == 2) {
    const auto refusal = [&](const std::string& layout) {
      try {
        (void)loaded(divided, layout, world());
        return std::string("loaded");
      } catch (const Error& error) {
        return error.message() + " / " + error.help();
      }
    };
    CHECK_MESSAGE(refusal("").ends_with("give `dist.tp=2 dist.pp=1` or `dist.tp=1 dist.pp=2` or `dist.tp=1 "
                                        "dist.pp=1 dist.ep=2`; or start 1 rank"),
                  refusal(""));
    const std::string other = refusal("dist.tp=2 dist.etp=1");
    CHECK_MESSAGE(other.find("/ set dist.etp=2") != std::string::npos, other);
    // Nothing about batches of training: five experts, and a batch of one.
    const config::Resolution odd =
        stored_recipe("hf:" + std::string(test::kSourceDirectory) + "/tests/formats/families/mixtral",
                      words("dist.ep=2"), 2)
            .resolution;
    REQUIRE(config::count(odd.diagnostics, config::Level::error) == 1);
    CHECK(odd.diagnostics[0].code == "R0702");
    const StoredRecipe stages =
        stored_recipe(divided.string(), words("dist.pp=2 train.global_batch_size=1"), 2);
    CHECK(std::ranges::count(stages.resolution.diagnostics, "R0315", &config::Diagnostic::code) == 0);
    for (const std::string more : {"", " dist.etp=1 dist.sp=true"}) {
      const std::string both = refusal("dist.tp=2 dist.ep=2" + more);
      CHECK_MESSAGE(both.find("dist.tp=2 and dist.ep=2 exclude each other here") != std::string::npos, both);
      CHECK_MESSAGE(both.find("`dist.tp=1 dist.pp=1 dist.ep=2`") != std::string::npos, both);
      CHECK_MESSAGE(both.find("set dist.sequence_parallel") == std::string::npos, both);
    }
  }
}

TEST_CASE("a model that was trained with a capacity of its experts drops no token afterwards") {
  const fs::path checkpoint = trained_by_rank_0(
      "moe", "model.moe_expert_capacity_factor=0.5 model.moe_pad_expert_input_to_capacity=true", "capacity");
  const auto alone = comm::World::single_process();
  LoadedModel model = loaded(checkpoint, "", *alone);
  CHECK_FALSE(model.config().model.moe_expert_capacity_factor);
  // Logits do not depend on how many tokens are computed at once.
  const std::vector<int32_t> tokens{1, 2, 3, 1, 2, 3, 1, 2, 3, 4};
  auto at_once = model.make_cache(24), one_by_one = model.make_cache(24);
  std::vector<float> last;
  for (const int32_t token : tokens) last = model.next_logits({&token, 1}, one_by_one);
  check_near(model.next_logits(tokens, at_once), last);
}

TEST_CASE("models with experts of every family generate alike on several ranks") {
  if (world().size() == 1) return;
  const std::string ranks = std::to_string(world().size());
  for (const std::string name : {"latent_moe", "gpt_oss", "moe_bias", "moe_mtp"}) {
    const fs::path checkpoint = trained_by_rank_0(name, "", "of-experts-" + name);
    for (const std::string layout : {"dist.tp=", "dist.pp=", "dist.ep="})
      check_served(checkpoint, layout + ranks);
  }
}

TEST_CASE("a model whose multi-token prediction has a pipeline stage of its own is served without it") {
  if (world().size() == 1) return;
  const std::string layout = world().size() == 2
                                 ? "dist.pp=2 dist.pipeline_model_parallel_layout=Ettttmm|L"
                                 : "dist.pp=4 dist.pipeline_model_parallel_layout=Ett|tt|mm|L";
  const fs::path checkpoint = trained(recipe("gpt_mtp", layout, world().size()), world(), "mtp");
  check_served(checkpoint, "");
  check_served(checkpoint, layout);
  check_served(checkpoint, "dist.pp=1 dist.tp=" + std::to_string(world().size()));
  LoadedModel model = loaded(checkpoint, layout, world());
  CHECK_FALSE(model.config().model.mtp_num_layers);
}

TEST_CASE("the keys and values of a sequence are sharded over tensor and pipeline ranks") {
  const fs::path checkpoint = trained_by_rank_0("gpt", "", "cache");
  for (const std::string& layout : layouts()) {
    if (layout.find("Ettt") != std::string::npos) continue;
    CAPTURE(layout);
    LoadedModel model = loaded(checkpoint, layout, world());
    auto cache = model.make_cache(24);
    model.next_logits(std::vector<int32_t>{1, 2, 3}, cache);
    int64_t elements = 0;
    for (const ops::LayerKvCache& layer : cache.layers) elements += layer.k.elements();
    CHECK(elements * world().size() == 4 * 24 * 48);  // layers, tokens, hidden: as many heads as groups
  }
}

TEST_CASE("a recipe for many ranks is served on one, and by its tensor and pipeline ranks") {
  const std::string many =
      "dist.tp=2 dist.pp=2 dist.vpp=2 dist.cp=2 dist.sp=true dist.cp_comm_type=a2a "
      "comm_overlap.tp_comm_overlap=true "
      "ddp.data_parallel_sharding_strategy=optim_grads_params ddp.overlap_grad_reduce=true "
      "ddp.overlap_param_gather=true model.recompute_granularity=full model.recompute_num_layers=1 "
      "profiling.trace=true profiling.profile_ranks=[15]";
  const fs::path checkpoint =
      trained_by_rank_0("gpt", "", "wide", config::resolved_recipe(recipe("gpt", many, 16)));
  const auto served = [&](const std::string& overrides, int64_t ranks) {
    const StoredRecipe stored = stored_recipe(checkpoint.string(), words(overrides), ranks);
    stored.resolution.require_ok();
    const config::Config& c = stored.resolution.config;
    CHECK(c.dist.world_size == ranks);
    CHECK(c.dist.context_parallel_size == 1);
    CHECK(c.dist.data_parallel_size == 1);
    CHECK_FALSE(c.dist.sequence_parallel);
    CHECK_FALSE(c.dist.virtual_pipeline_model_parallel_size);
    CHECK(c.ddp.data_parallel_sharding_strategy == config::ShardingStrategy::no_shard);
    CHECK_FALSE(c.model.recompute_granularity);
    CHECK(c.model.hidden_size == 48);
    return std::vector<int64_t>{c.dist.tensor_model_parallel_size, c.dist.pipeline_model_parallel_size};
  };
  CHECK(served("", 1) == std::vector<int64_t>{1, 1});
  CHECK(served("", 4) == std::vector<int64_t>{2, 2});
  CHECK(served("dist.pp=1", 2) == std::vector<int64_t>{2, 1});
  CHECK(served("dist.tp=1 dist.pp=4", 4) == std::vector<int64_t>{1, 4});

  const auto refused = [&](const std::string& overrides, int64_t ranks, const std::string& part) {
    try {
      stored_recipe(checkpoint.string(), words(overrides), ranks).resolution.require_ok();
      FAIL_CHECK(overrides, " on ", ranks, " ranks");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::config);
      const std::string text = error.message() + " / " + error.help();
      CHECK_MESSAGE(text.find(part) != std::string::npos, text);
    }
  };
  refused("", 8, "2 * 2 = 4 ranks, and there are 8 / give `dist.tp=8 dist.pp=1` or `dist.tp=4 dist.pp=2` or");
  refused("dist.pp=1", 4, "2 * 1 = 2 ranks, and there are 4");
  refused("", 2, "the world of 2 ranks is not a multiple of tensor * pipeline * context = 2 * 2 * 1 = 4");
  refused("dist.tp=2", 1, "the world of 1 rank is not a multiple");
  refused("dist.tp=3 dist.pp=1", 3, "is not divisible by the tensor-parallel size 3");
  refused("dist.tp=1 dist.pp=1 dist.cp=2", 2, "dist.context_parallel_size=2");
  refused("dist.tp=2 dist.pp=1 dist.sp=true", 2, "dist.sequence_parallel=true");
  world().communicator().barrier();
  const auto alone = comm::World::single_process();
  LoadedModel one = loaded(checkpoint, "", *alone);
  auto cache = one.make_cache(1);
  CHECK(one.next_logits(std::vector<int32_t>{5}, cache).size() == 257);
}

TEST_CASE("ranks that are given different checkpoints or layouts say so") {
  if (world().size() == 1) return;
  const fs::path a = trained_by_rank_0("gpt", "", "a"), b = trained_by_rank_0("gpt", "", "b");
  const std::string ranks = std::to_string(world().size());
  const bool first = world().rank() == 0;
  const auto refused = [&](const fs::path& checkpoint, const std::string& layout, const std::string& part) {
    try {
      (void)loaded(checkpoint, layout, world());
      FAIL_CHECK("loaded");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::rank_failure);
      CHECK_MESSAGE(error.message().find(part) != std::string::npos, error.message());
    }
  };
  refused(first ? a : b, "dist.tp=" + ranks, "about the checkpoint");
  refused(a, (first ? "dist.tp=" : "dist.pp=") + ranks, "about the recipe: `");
}

TEST_CASE("cleaning up") {
  world().communicator().barrier();
  if (world().rank() == 0) fs::remove_all(scratch());
}
