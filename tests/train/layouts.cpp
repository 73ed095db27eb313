// The equivalence matrix: the same recipe gives the same losses and parameters on every layout as on one
// rank. Runs on any number of ranks and takes the layouts of that size: some, or with CAPSTAN_EVERY_LAYOUT
// the full matrix. The environment variable CAPSTAN_LAYOUTS selects those that contain it in "RECIPE
// OVERRIDES".
#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>

#include "base/file.hpp"
#include "base/philox.hpp"
#include "base/text.hpp"
#include "checkpoint/reader.hpp"
#include "config/resolve/resolve.hpp"
#include "data/indexed_writer.hpp"
#include "formats/convert.hpp"
#include "support/paths.hpp"
#include "support/running.hpp"
#include "support/sanitized.hpp"
#include "support/worlds.hpp"
#include "tests/train/forced_routing.hpp"
#include "tests/train/layouts_table.hpp"
#include "train/adapters/adapters.hpp"
#include "train/setup/model.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
namespace fs = std::filesystem;

namespace {

using test::kLayouts;
using test::Layout;
using test::Routing;
using test::world;

const bool kAll = std::getenv("CAPSTAN_EVERY_LAYOUT") != nullptr;

// Eight ranks would not divide twelve sequences.
constexpr const char* kBatchOfEight = "train.global_batch_size=8";
constexpr const char* kLargeBatch = LARGE_BATCH;

// The same on all ranks; all of them ask together the first time.
const fs::path& scratch() {
  static const fs::path path = [] {
    int64_t id = ::getpid();
    world().communicator().broadcast(&id, sizeof id, 0);
    return fs::temp_directory_path() / ("capstan-layouts-" + std::to_string(id));
  }();
  return path;
}
// The prefix of documents of 2 to 20 bytes, each with its end; asked for as scratch().
const std::string& documents() {
  static const std::string prefix = [] {
    const std::string path = (scratch() / "documents").string();
    if (world().rank() == 0) {
      fs::create_directories(scratch());
      data::IndexedWriter writer(path, data::TokenType::u16);
      PhiloxSequence random(philox_key(3, purpose::test, 0));
      while (writer.tokens() < 8000) {
        std::vector<int32_t> text(2 + random.below(19));
        for (int32_t& token : text) token = static_cast<int32_t>(97 + random.below(8));
        text.push_back(256);
        const auto length = static_cast<int32_t>(text.size());
        writer.add_document(text, {&length, 1});
      }
      writer.finish();
    }
    world().communicator().barrier();
    return path;
  }();
  return prefix;
}

// A file of prompts and answers of 2 to 9 bytes; asked for as scratch().
const std::string& samples() {
  static const std::string path = [] {
    const std::string file = (scratch() / "samples.jsonl").string();
    if (world().rank() == 0) {
      fs::create_directories(scratch());
      PhiloxSequence random(philox_key(4, purpose::test, 0));
      const auto text = [&] {
        std::string letters;
        for (uint64_t left = 2 + random.below(8); left > 0; --left)
          letters += static_cast<char>('a' + random.below(8));
        return letters;
      };
      std::string lines;
      for (int i = 0; i < 300; ++i) {
        lines += R"({"prompt": ")" + text();
        lines += R"(", "completion": ")" + text() + "\"}\n";
      }
      write_file_durably(file, lines);
    }
    world().communicator().barrier();
    return file;
  }();
  return path;
}

config::Config resolve(const std::string& recipe, const std::string& overrides, int64_t ranks,
                       std::string* errors = nullptr) {
  config::Request request;
  request.recipe = std::string(capstan::test::kSourceDirectory) + "/tests/train/layouts/" + recipe + ".yaml";
  if (recipe.starts_with("packed"))
    request.overrides.push_back(config::Override::token("dataset.data_path=" + documents()));
  if (recipe == "moe_padded")
    request.overrides.push_back(config::Override::token("dataset.train_files=[" + samples() + "]"));
  if (recipe == "lion" || recipe == "sgd")
    request.overrides.push_back(config::Override::token("~optimizer.adam_eps"));
  std::string word;
  for (const char c : overrides + " dist.world_size=" + std::to_string(ranks) + " ") {
    if (c == '\'') continue;
    if (c != ' ') {
      word += c;
      continue;
    }
    if (!word.empty()) request.overrides.push_back(config::Override::token(word));
    word.clear();
  }
  const config::Resolution resolution = config::resolve(request);
  if (errors) {
    for (const auto& d : resolution.diagnostics)
      if (d.level == config::Level::error) *errors += d.message + "\n";
    return resolution.config;
  }
  resolution.require_ok();
  return resolution.config;
}

// Bytes of losses and norms in a step.
constexpr double kScalars = 200;

struct Run {
  // Loss and gradient norm of each step.
  std::vector<double> trace;
  // After all steps, and after kRepeated steps where there are more.
  fs::path checkpoint, early_checkpoint;
  // CUDA graphs that were launched.
  int64_t graphs = 0;
};
// Steps that are run again to compare their bits.
constexpr int64_t kRepeated = 4;
// How far an estimate may be from what a step uses and sends, as a fraction.
constexpr double kTolerance = 0.02;
// Whether numbers of rows depend on the routing, for which the estimate takes an equal load.
bool exchanges_rows(const config::Config& c) {
  return c.model.num_moe_experts && c.dist.expert_model_parallel_size > 1 &&
         c.model.moe_token_dispatcher_type == config::TokenDispatcher::alltoall &&
         !c.model.moe_pad_expert_input_to_capacity;
}
// The few tokens here are up to a fifth away from an equal load.
double estimate_tolerance(const config::Config& c) {
  return exchanges_rows(c) ? 0.25 : kTolerance;
}

Routing routing_of(const std::string& recipe) {
  if (recipe.starts_with("moe_collapsed")) return Routing::collapsed;
  return recipe.starts_with("moe_empty") ? Routing::empty_experts : Routing::free;
}

// Bytes sent to each group, and kernels launched on each queue.
struct Counts {
  std::map<std::string, int64_t> sent;
  std::array<int64_t, kQueues> launched{};
  explicit Counts(StepRunner& runner) : sent(sent_bytes(runner.mesh())) {
    for (size_t q = 0; q < kQueues; ++q) launched[q] = runner.device().launches(static_cast<Queue>(q));
  }
};

void check_counts(const Counts& before, const Counts& after, const StepEstimate& estimate, double tolerance) {
  for (const auto& [group, bytes] : after.sent) {
    const int64_t sent = bytes - before.sent.at(group);
    INFO(group, ": ", sent, " bytes sent in a step");
    const auto estimated = static_cast<double>(estimate.sent.at(group));
    const double allowed = group == "ep" || group == "etp" ? tolerance : kTolerance;
    CHECK(std::abs(static_cast<double>(sent) - estimated) <= allowed * estimated + kScalars);
  }
  for (size_t q = 0; q < kQueues; ++q) {
    INFO("queue ", name_of(static_cast<Queue>(q)));
    // Kernels over no rows are not launched, where a rank gets none.
    const auto expected = static_cast<double>(estimate.launches_by_queue[q]);
    const auto got = static_cast<double>(after.launched[q] - before.launched[q]);
    CHECK(got <= expected);
    CHECK(got >= (tolerance == kTolerance ? 1 : 1 - kTolerance) * expected);
  }
}

void check_memory(const MemoryUse& used, const MemoryUse& estimated, double tolerance) {
  INFO("estimated: ", memory_text(estimated));
  INFO("used: ", memory_text(used));
  CHECK(static_cast<double>(used.peak) <= (1 + tolerance) * static_cast<double>(estimated.peak));
  CHECK(static_cast<double>(used.peak) >= (1 - tolerance) * static_cast<double>(estimated.peak));
  CHECK(static_cast<double>(used.reserved) <= (1 + tolerance) * static_cast<double>(estimated.reserved));
  CHECK(static_cast<double>(used.reserved) >= (1 - tolerance) * static_cast<double>(estimated.reserved));
  for (size_t category = 0; category < kMemoryCategories; ++category) {
    // With another number of rows another moment of the step may have the peak, at which the optimizer's
    // state is always there.
    const bool lasts = category == static_cast<size_t>(MemoryCategory::main_parameters) ||
                       category == static_cast<size_t>(MemoryCategory::moments);
    if (tolerance != kTolerance && !lasts) continue;
    const auto apart =
        static_cast<double>(used.peak_by_category[category] - estimated.peak_by_category[category]);
    CHECK_MESSAGE(std::abs(apart) <= kTolerance * static_cast<double>(estimated.peak),
                  name_of(static_cast<MemoryCategory>(category)));
  }
}

// Buffers of micro-batches, of transfers and of the save.
void check_pinned_memory(const MemoryUse& used, const MemoryUse& estimated, double tolerance) {
  if (tolerance == kTolerance) {
    CHECK(used.total() == estimated.total());
    CHECK(used.peak_by_category == estimated.peak_by_category);
  } else {
    CHECK(std::abs(static_cast<double>(used.total() - estimated.total())) <=
          tolerance * static_cast<double>(estimated.total()));
  }
}

Run train_steps(const std::string& recipe, const config::Config& config, comm::World& on,
                const std::string& name, int64_t steps) {
  StepRunner runner(config, on);
  runner.initialize();
  if (config.peft) begin_adapters(config, runner.device(), runner.store(), BaseWeights{});
  const Routing routing = routing_of(recipe);
  if (routing != Routing::free) test::force_routing(runner, config.model, routing);
  const auto data = open_datasets(config, load_tokenizer(config).get());
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  // The estimate for this rank, which needs no other ranks. It takes an equal load of the experts by all
  // positions, from which forced routing and padding are far.
  const StepEstimate estimate = estimate_step(config, on.rank());
  const bool as_estimated = (routing == Routing::free && recipe != "moe_padded") || !exchanges_rows(config);
  const double tolerance = estimate_tolerance(config);
  Run run;
  const auto save = [&](const std::string& directory) {
    SavePlan plan;
    plan.root = scratch() / directory;
    if (on.rank() == 0) fs::create_directories(plan.root);
    on.communicator().barrier();
    return save_state(on, plan, runner.state(), runner.store(), runner.optimizer());
  };
  std::optional<Counts> before;
  while (runner.state().step < steps) {
    if (runner.state().step == 1) before.emplace(runner);
    const StepResult result = runner.train_step(loader, timers);
    run.trace.push_back(result.loss);
    run.trace.push_back(result.gradient_norm);
    if (routing != Routing::free) test::check_routing(result, config, routing);
    if (runner.state().step == 2 && as_estimated) check_counts(*before, Counts(runner), estimate, tolerance);
    if (runner.state().step == kRepeated && steps > kRepeated) run.early_checkpoint = save(name + "early");
  }
  if (as_estimated) check_memory(runner.device().memory(), estimate.memory, tolerance);
  run.graphs = runner.device().graph_counts().graphs;
  run.checkpoint = save(name);
  if (as_estimated)
    check_pinned_memory(runner.device().memory(MemoryKind::host), estimate.host_memory, tolerance);
  return run;
}
using Tensors = std::map<std::string, std::vector<float>>;
Tensors read_all(const fs::path& checkpoint) {
  auto reader = checkpoint::Reader::open(checkpoint, checkpoint::Verification::content);
  Tensors tensors;
  for (const auto& [name, stored] : reader.manifest().tensors) {
    auto& values = tensors[name];
    values.resize(static_cast<size_t>(stored.shape.elements()));
    reader.read_all(name, DType::f32, std::as_writable_bytes(std::span(values)));
  }
  return tensors;
}

// The single rank's run, made once for each recipe and its mathematics; rank 0 makes it.
const Run& single_rank(const std::string& recipe, const std::string& overrides, int64_t steps) {
  static std::map<std::string, Run> runs;
  std::string maths;
  for (const char* const part : {DROP, FP8("delayed"), FP8("tensorwise"), FP8("blockwise"), FP8("mxfp8"), FP4,
                                 FP16, SGD, OF_SEQUENCES, TWO_LOSSES, IN_GROUPS, NOISE, ROUTER_IN_FP64,
                                 EXPERT_BIASES, DROPS, ONE_CHOICE, kBatchOfEight, kLargeBatch})
    if (overrides.find(part) != std::string::npos) maths += std::string(part) + " ";
  if (overrides.find(BF16) != std::string::npos && maths.find(BF16) == std::string::npos) maths += BF16 " ";
  const std::string key = recipe + " " + maths + std::to_string(steps);
  const auto found = runs.find(key);
  if (found != runs.end()) return found->second;
  const auto alone = comm::World::single_process();
  return runs[key] = train_steps(recipe, resolve(recipe, maths, 1), *alone,
                                 "one" + std::to_string(runs.size()), steps);
}

bool rounds_below_fp32(const std::string& recipe, const std::string& overrides) {
  return recipe.starts_with("moments") || overrides.find(BF16) != std::string::npos ||
         overrides.find(FP16) != std::string::npos;
}

// Of a row of the matrix: its own, or bf16 in place of fp32.
enum class Precision : uint8_t { own, bf16_column };

// How far layouts may be apart: sums in another order, which bf16 operands round to.
struct Apart {
  double loss, norm, parameters, moments;
  // With GEMMs in 8 and 4 bits, whose codes differ where sums do: the root mean square of the difference of a
  // moment over that of its values, at most, and the median over all moments. As measured, at most 0.43 and
  // 0.046 in FP8, 0.80 and 0.182 in FP4. Zeros in place of the gradients make both 1.
  double mean_square = 0, median = 0;
  // FP4, whose gradients are rounded stochastically: second moments are compared by their roots, by which
  // Adam divides and whose error is that of a gradient.
  bool roots = false;
  // Losses and gradient norms alone.
  bool tensors = true;
  Apart(const std::string& recipe, const std::string& overrides, Precision precision) {
    if (precision == Precision::bf16_column) {
      loss = 2e-2, norm = 0.1, parameters = moments = 0, tensors = false;
      return;
    }
    const bool bf16 = rounds_below_fp32(recipe, overrides);
    loss = bf16 ? 2e-3 : 1e-5, norm = bf16 ? 2e-2 : 1e-4;
    parameters = bf16 ? 1e-2 : 1e-5, moments = bf16 ? 5e-2 : 1e-3;
    if (overrides.find("mixed_precision.fp8=") != std::string::npos)
      loss = 5e-3, norm = 5e-2, parameters = 3e-2, moments = 0.6, mean_square = 0.6, median = 0.1;
    if (overrides.find("mixed_precision.fp4=") != std::string::npos)
      loss = 1e-2, norm = 0.15, parameters = 5e-2, moments = 1.2, mean_square = 0.9, median = 0.25,
      roots = true;
    // A token near a tie of the router may go to another expert; with forced choices the toy model's large
    // weights make more of the differences in FP8, as measured at most 0.034 and 0.139.
    if (bf16 && recipe.starts_with("moe")) {
      loss = 2e-2, norm = 0.1;
      if (median > 0)
        parameters = 5e-2, median = 0.2;
      else
        parameters = 2e-2, moments = 0.3;
    }
    // Parameters in bf16 differ by a last place, gradients with them, and their squares by twice as much; the
    // last place of E4M3.
    if (recipe == "moments") moments = 0.1;
    if (recipe == "moments_fp8") moments = 0.15;
    // Where Lion's direction is near zero its sign may differ: one step, there and not back, of lr = 1e-4. A
    // weight that takes all steps moves ten times as far.
    if (recipe == "lion") parameters = 2.1e-4;
  }
};

void check_layout(const std::string& recipe, const std::string& overrides, int64_t steps, bool twice,
                  Precision precision = Precision::own) {
  INFO(recipe, " on ", world().size(), " ranks: ", overrides);
  const config::Config config = resolve(recipe, overrides, world().size());
  static int number = 0;
  const std::string name = "many" + std::to_string(number++);
  const Run got = train_steps(recipe, config, world(), name, steps);
  const bool graphs = config.model.cuda_graph_impl == config::CudaGraphImpl::local;
  CHECK((got.graphs > 0) == graphs);
  if (twice || graphs) {
    config::Config same = config;
    same.model.cuda_graph_impl = config::CudaGraphImpl::none;
    const Run again = train_steps(recipe, same, world(), name + "again", std::min(steps, kRepeated));
    REQUIRE(again.trace.size() <= got.trace.size());
    CHECK(std::ranges::equal(again.trace, std::span(got.trace).first(again.trace.size())));
    const fs::path& same_step = steps > kRepeated ? got.early_checkpoint : got.checkpoint;
    if (world().rank() == 0) CHECK((read_all(again.checkpoint) == read_all(same_step)));
  }
  if (world().rank() == 0) {
    const Run& expected = single_rank(recipe, overrides, steps);
    const Apart allowed(recipe, overrides, precision);
    REQUIRE(got.trace.size() == expected.trace.size());
    for (size_t i = 0; i < got.trace.size(); ++i) {
      INFO("step ", i / 2 + 1, std::string(i % 2 ? ": gradient norm" : ": loss"));
      REQUIRE(got.trace[i] ==
              doctest::Approx(expected.trace[i]).epsilon(i % 2 ? allowed.norm : allowed.loss));
    }
    Tensors theirs, ours;
    if (allowed.tensors) theirs = read_all(expected.checkpoint), ours = read_all(got.checkpoint);
    REQUIRE(ours.size() == theirs.size());
    std::vector<double> relative;
    for (const auto& [tensor, values] : theirs) {
      const auto& other = ours.at(tensor);
      REQUIRE(other.size() == values.size());
      double most = 0, apart = 0, squares = 0, squares_apart = 0;
      const bool root = allowed.roots && tensor.starts_with("optimizer.exp_avg_sq.");
      const auto compared = [root](float x) {
        return root ? std::sqrt(static_cast<double>(x)) : static_cast<double>(x);
      };
      for (size_t i = 0; i < values.size(); ++i) {
        const double value = compared(values[i]), difference = value - compared(other[i]);
        most = std::max(most, std::abs(value)), apart = std::max(apart, std::abs(difference));
        squares += value * value, squares_apart += difference * difference;
      }
      // Moments are sums of gradients, whose rounding does not shrink with them.
      const bool moment = tensor.starts_with("optimizer.");
      INFO("`", tensor, "`: ", apart, " apart, largest ", most);
      REQUIRE(apart <= (moment ? allowed.moments : allowed.parameters) * std::max(most, moment ? 1e-6 : 1.0));
      if (moment && allowed.median > 0) {
        relative.push_back(std::sqrt(squares_apart) / std::max(std::sqrt(squares), 1e-6));
        REQUIRE(relative.back() <= allowed.mean_square);
      }
    }
    std::ranges::sort(relative);
    if (!relative.empty()) REQUIRE(relative[relative.size() / 2] <= allowed.median);
  }
  world().communicator().barrier();
}

}  // namespace

TEST_CASE("the same recipe gives the same losses and parameters on every layout") {
  for (const Layout& layout : kLayouts) {
    if (layout.ranks != world().size() || (!kAll && !layout.fast)) continue;
    const char* const only = std::getenv("CAPSTAN_LAYOUTS");
    if (only && (std::string(layout.recipe) + " " + layout.overrides).find(only) == std::string::npos)
      continue;
    std::string overrides = layout.overrides;
    if (world().size() == 8) overrides += std::string(" ") + kBatchOfEight;
    // Rounding below fp32 makes two runs part ways: their first steps are compared.
    const bool bf16 = rounds_below_fp32(layout.recipe, overrides);
    const bool slow = overrides.find(SIMULATED) != std::string::npos;
    // The checked device finds a missing wait in every step, whether or not values differ.
    const bool checked = overrides.find(" train.device=checked") != std::string::npos;
    const int64_t steps = slow ? 3 : bf16 || test::kSanitized ? 4 : checked ? 8 : 20;
    check_layout(layout.recipe, overrides, steps, !slow && !test::kSanitized);
  }
}

// Whether a row computes in fp32 on the CPU, and can compute in bf16.
bool has_bf16_column(const Layout& layout) {
  const std::string row = std::string(layout.recipe) + " " + layout.overrides;
  return row.find("mixed_precision") == std::string::npos && row.find("device=") == std::string::npos &&
         !row.starts_with("moments") && !row.starts_with("qlora");
}

TEST_CASE("half of the rows in fp32 give the same losses in bf16") {
  int number = 0;
  for (const Layout& layout : kLayouts) {
    if (!has_bf16_column(layout) || number++ % 2 == 0) continue;
    if (layout.ranks != world().size() || !kAll || test::kSanitized) continue;
    std::string overrides = std::string(layout.overrides) + " " BF16;
    if (world().size() == 8) overrides += std::string(" ") + kBatchOfEight;
    check_layout(layout.recipe, overrides, 4, false, Precision::bf16_column);
  }
}

namespace {

// Draws overrides.
class Draw {
 public:
  explicit Draw(uint64_t number)
      : random_(philox_key(static_cast<uint64_t>(world().size()), purpose::test, number)) {}
  std::string of(const std::vector<std::string>& choices) { return choices[random_.below(choices.size())]; }
  std::string layout() {
    std::string text = "dist.tp=" + of({"1", "2", "3", "4", "8"});
    text += " dist.pp=" + of({"1", "2", "4"}) + " ";
    text += "dist.cp=" + of({"1", "2", "3", "4"}) + " ";
    text += "dist.cp_comm_type=" + of({"p2p", "all_gather", "a2a"}) + " ";
    text += of({"", "dist.sp=true "});
    text += of({"", "dist.vpp=2 "});
    text += SHARD + of({"no_shard", "optim", "optim_grads", "optim_grads_params"}) + " ";
    return text + of({"", "ddp.overlap_grad_reduce=true "});
  }
  std::string layout_of_experts() {
    std::string text = of({EP("1"), EP("2"), EP("4"), EXCHANGED("2"), EXCHANGED("4"), EXCHANGED("8")});
    text += of({"", "dist.etp=1 ", "dist.etp=2 "});
    text += of({"", ZB_H1, ZB_V});
    text += of({"", BESIDE_SHARED, PADDED " "});
    text += of({"", HYBRID});
    text += of({"", "ddp.overlap_param_gather=true "});
    return text + of({"", FULL, RECOMPUTE("moe"), RECOMPUTE("layernorm,moe_act,shared_experts")});
  }

 private:
  PhiloxSequence random_;
};

// Trains on the first drawn layouts that the rules allow: recipe and overrides.
void check_drawn(const std::function<std::pair<std::string, std::string>()>& draw) {
  int tried = 0;
  for (int number = 0; number < 4000 && tried < (kAll ? 6 : 1); ++number) {
    auto [recipe, overrides] = draw();
    if (world().size() == 8) overrides += std::string(" ") + kBatchOfEight;
    std::string errors;
    (void)resolve(recipe, overrides, world().size(), &errors);
    if (!errors.empty()) continue;
    ++tried;
    check_layout(recipe, overrides, 4, false);
  }
  CHECK(tried > 0);
}

}  // namespace

TEST_CASE("random legal layouts") {
  if (world().size() == 1) return;
  Draw draw(77);
  check_drawn([&] {
    const std::string recipe = draw.of({"gpt", "llama"}), layout = draw.layout();
    const std::string recomputed = draw.of({"", FULL " "}), dropout = draw.of({"", DROP " "});
    return std::pair{recipe, layout + recomputed + dropout + "train.micro_batch_size=" + draw.of({"1", "2"})};
  });
}

TEST_CASE("random legal layouts of models with experts, also beside adapters") {
  if (world().size() == 1) return;
  Draw draw(78);
  check_drawn([&] {
    const std::string recipe = draw.of({"moe_four", "moe_bias", "moe_turns", "moe_mtp", "moe_lora",
                                        "moe_canonical", "latent_moe", "gpt_oss"}),
                      layout = draw.layout();
    return std::pair{recipe, layout + draw.layout_of_experts()};
  });
}

TEST_CASE(
    "a checkpoint of any layout loads into any other: the bits of parameters and moments, and the next "
    "losses, which the same layout gives bit for bit") {
  if (world().size() != 4) return;
  const std::vector<Layout> of_dense_layers{
      {1, true, "", ""},
      {2, false, "", "dist.tp=2 dist.sp=true"},
      {2, false, "", "dist.pp=2 dist.vpp=2"},
      {2, false, "", "dist.pp=2 " ZB_V},
      {2, false, "", "ddp.overlap_grad_reduce=true"},
      {2, false, "", SHARD "optim_grads"},
      {2, true, "", SHARD "optim ddp.bucket_size=2000"},
      {4, false, "", "dist.tp=4"},
      {4, true, "", "dist.tp=2 dist.pp=2"},
      {4, false, "", "dist.cp=2 " SHARD "optim_grads_params"},
      {4, false, "", "dist.pp=2 " SHARD "optim_grads"},
      {4, true, "", "dist.tp=2 dist.sp=true " SHARD "optim_grads_params"},
      {4, false, "",
       "ddp.num_distributed_optimizer_instances=2 ddp.outer_dp_sharding_strategy=optim " SHARD "optim"},
  };
  const std::vector<Layout> of_experts{
      {1, true, "", ""},
      {2, true, "", "dist.tp=2"},
      {2, true, "", EXCHANGED("2")},
      {4, true, "", EP("4") SHARD "optim"},
      {4, true, "", EXCHANGED("2") "dist.tp=2 dist.sp=true"},
  };
  // Multi-token prediction beside the loss, and in stages before it.
  const std::vector<Layout> of_mtp{
      {1, true, "", ""},
      {2, true, "", "dist.pp=2"},
      {2, true, "", "dist.pp=2 " STAGES("Ettttmm|L")},
      {2, true, "", "dist.pp=2 " ZB_V STAGES("Ett|tt|mm|L")},
      {4, true, "", "dist.tp=2 dist.sp=true dist.pp=2 " STAGES("Ett|tt|mm|L")},
      {4, true, "", "dist.pp=2 " STAGES("Ettttmm|L") SHARD "optim_grads_params"},
      {4, true, "", "dist.pp=4 " STAGES("Ett|tt|mm|L")},
  };
  const auto alone = comm::World::single_process();
  const bool in_half = world().rank() < 2;
  capstan::test::PartWorld half(world(), in_half ? 0 : 1);
  for (const std::string recipe : {"gpt", "llama", "dora", "lion", "sgd", "muon", "moments", "moments_fp8",
                                   "moe_bias", "moe_four", "moe_lora", "gpt_mtp"}) {
    const std::vector<Layout>& layouts = recipe == "moe_lora" || recipe == "moe_four" ? of_experts
                                         : recipe == "gpt_mtp"                        ? of_mtp
                                                                                      : of_dense_layers;
    // Beside weights that the checkpoint does not hold.
    const bool adapters = recipe == "dora" || recipe == "moe_lora";
    // Blocks of fp8 moments begin where a rank's elements do: another layout rounds again.
    const bool same_layout = recipe == "moments_fp8";
    const bool few = test::kSanitized || (recipe != "gpt" && recipe != "llama");
    const auto on = [&](const Layout& layout, auto&& body) {
      const int me = world().rank();
      if (me < layout.ranks)
        body(layout.ranks == 1 ? *alone : layout.ranks == 2 ? static_cast<comm::World&>(half) : world());
      world().communicator().barrier();
    };
    const auto save = [&](comm::World& members, StepRunner& runner, const fs::path& root) {
      SavePlan plan;
      plan.root = root;
      if (members.rank() == 0) fs::create_directories(plan.root);
      members.communicator().barrier();
      return save_state(members, plan, runner.state(), runner.store(), runner.optimizer());
    };
    // Losses and gradient norms of two steps: the second's depend on the moments too. And the loss of an
    // evaluation after them.
    const auto next_steps = [](StepRunner& runner, const config::Config& config) {
      auto trace = test::run_until(runner, config, runner.state().step + 2);
      trace.push_back(runner.evaluate(open_datasets(config, nullptr)[0], 1));
      return trace;
    };
    for (size_t from = 0; from < layouts.size(); ++from) {
      if (few && !layouts[from].fast && (!kAll || recipe == "dora")) continue;
      const fs::path root = scratch() / ("from-" + recipe + std::to_string(from));
      Tensors saved;
      std::vector<double> expected;
      on(layouts[from], [&](comm::World& members) {
        const config::Config config = resolve(recipe, layouts[from].overrides, members.size());
        StepRunner runner(config, members);
        runner.initialize();
        next_steps(runner, config);
        const fs::path checkpoint = save(members, runner, root);
        expected = next_steps(runner, config);
        if (members.rank() == 0) saved = read_all(checkpoint);
      });
      for (size_t to = 0; to < layouts.size(); ++to) {
        if (!kAll && to != from && !(layouts[from].fast && layouts[to].fast)) continue;
        const bool both_fast = layouts[from].fast && layouts[to].fast;
        if (few && to != from && (!kAll || same_layout || !both_fast)) continue;
        INFO(recipe, " from [", layouts[from].overrides, "] to [", layouts[to].overrides, "]");
        on(layouts[to], [&](comm::World& members) {
          const config::Config config = resolve(recipe, layouts[to].overrides, members.size());
          StepRunner runner(config, members);
          if (adapters) runner.initialize();
          test::load_into(runner, root / checkpoint::step_directory_name(2));
          const fs::path again = save(members, runner, scratch() / ("to-" + std::to_string(to)));
          if (members.rank() == 0) CHECK((read_all(again) == saved));
          const auto trace = next_steps(runner, config);
          if (to == from) CHECK(trace == expected);  // on every rank: a resume is the uninterrupted run
          for (size_t i = 0; members.rank() == 0 && i < trace.size(); ++i)
            CHECK(trace[i] == doctest::Approx(expected[i])
                                  .epsilon(rounds_below_fp32(recipe, "") ? (i % 2 ? 2e-2 : 2e-3)
                                                                         : (i % 2 ? 1e-4 : 1e-5)));
        });
      }
    }
  }
}

TEST_CASE(
    "a checkpoint of eight expert-parallel ranks loads into two, into one and into tensor-parallel ranks, "
    "and "
    "is exported as the same files by all of them") {
  if (world().size() != 8) return;
  const auto alone = comm::World::single_process();
  capstan::test::PartWorld pair(world(), world().rank() / 2);
  const fs::path root = scratch() / "experts";
  const auto save = [&](comm::World& members, StepRunner& runner, const fs::path& to) {
    SavePlan plan;
    plan.root = to;
    if (members.rank() == 0) fs::create_directories(plan.root);
    members.communicator().barrier();
    return save_state(members, plan, runner.state(), runner.store(), runner.optimizer());
  };
  const auto files_of = [&](const fs::path& checkpoint, const config::ModelConfig& model,
                            const std::string& to) {
    auto reader = checkpoint::Reader::open(checkpoint, checkpoint::Verification::content);
    formats::write_hf({&reader, model, {}}, root / to);
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(root / to))
      files[entry.path().filename().string()] = read_file(entry.path());
    return files;
  };
  fs::path checkpoint;
  {
    const config::Config config =
        resolve("moe_eight", EXCHANGED("8") SHARD "optim " + std::string(kBatchOfEight), 8);
    StepRunner runner(config, world());
    runner.initialize();
    test::run_until(runner, config, 2);
    checkpoint = save(world(), runner, root / "eight");
  }
  if (world().rank() > 1) return world().communicator().barrier();
  const Tensors saved = read_all(checkpoint);
  const std::vector<std::pair<int, std::string>> layouts{
      {2, EXCHANGED("2")}, {1, ""}, {2, "dist.tp=2 dist.sp=true"}};
  for (const auto& [ranks, overrides] : layouts) {
    if (world().rank() >= ranks) continue;
    CAPTURE(overrides);
    comm::World& members = ranks == 1 ? *alone : static_cast<comm::World&>(pair);
    const config::Config config = resolve("moe_eight", overrides + " " + kBatchOfEight, ranks);
    StepRunner runner(config, members);
    test::load_into(runner, checkpoint);
    const std::string name = "by" + std::to_string(ranks) + (overrides.starts_with("dist.tp") ? "tp" : "");
    const fs::path again = save(members, runner, root / name);
    if (members.rank() > 0) continue;
    CHECK((read_all(again) == saved));
    const auto theirs = files_of(checkpoint, config.model, name + "-of-eight");
    CHECK(theirs.contains("model.safetensors"));
    CHECK((files_of(again, config.model, name + "-hf") == theirs));
  }
  world().communicator().barrier();
}

TEST_CASE("non-finite values are located under tensor and pipeline parallelism and ZeRO") {
  if (world().size() != 4 && world().size() != 8) return;
  const bool sharded = world().size() == 8;
  for (const std::string place :
       {"layers.0.mlp.linear_fc1.weight", "layers.3.self_attention.linear_qkv.weight"}) {
    const char* const sharding =
        place.starts_with("layers.0") ? SHARD "optim_grads " : SHARD "optim_grads_params ";
    const std::string overrides =
        std::string("dist.tp=2 dist.pp=2 ") + (sharded ? sharding : "") + kBatchOfEight;
    INFO(place, " with ", overrides);
    const config::Config config = resolve("gpt", overrides, world().size());
    test::Running r(config);
    r.step();
    for (const auto& piece : r.runner.store().parameter_shards()) {  // on the ranks that have some of it
      if (!piece.parameter->name().ends_with(place)) continue;
      Tensor values = piece.values();
      auto numbers = values.to_host<float>();
      if (numbers.empty()) continue;
      numbers[numbers.size() / 2] = std::numeric_limits<float>::quiet_NaN();
      values.copy_from_host_bytes(std::as_bytes(std::span(numbers)));
    }
    std::string message;
    // Where the optimizer's values are not those of the model, a step passes before the model has them.
    for (int step = 0; step < 2 && message.empty(); ++step) try {
        r.step();
      } catch (const Error& error) {
        message = error.message();
      }
    CHECK_MESSAGE(message.find("the loss is nan") != std::string::npos, message);
    CHECK_MESSAGE(message.find(place) != std::string::npos, message);
    REQUIRE(r.runner.failure_anomalies().size() == 1);
    CHECK(r.runner.failure_anomalies()[0].event == "not_finite");
  }
}

TEST_CASE("a third of the matrix is in bf16") {
  int rows = 0, bf16 = 0, column = 0;
  for (const Layout& layout : kLayouts) {
    ++rows;
    bf16 += std::string(layout.overrides).find(BF16) != std::string::npos;
    column += has_bf16_column(layout);
  }
  CHECK(3 * (bf16 + column / 2) >= rows);
}

TEST_CASE("the matrix is as large as it says") {
  // Layouts whose " RECIPE OVERRIDES " has both texts: how many there are, and how many fast ones. Update
  // the numbers with the table.
  struct Kind {
    const char *device, *text;
    int all, fast;
  };
  for (const auto& [device, text, all, fast] : {Kind{"", "", 610, 101},
                                                {"", "dist.tp=", 198, 41},
                                                {"", "dist.pp=", 207, 32},
                                                {"", "dist.vpp=", 33, 9},
                                                {"", ZB_H1, 29, 2},
                                                {"", ZB_V, 41, 4},
                                                {"", "dist.cp=", 107, 5},
                                                {"", "dist.cp_comm_type=", 42, 0},
                                                {"", SHARD "optim ", 63, 16},
                                                {"", SHARD "optim_grads ", 48, 5},
                                                {"", SHARD "optim_grads_params ", 84, 11},
                                                {"", HYBRID, 24, 2},
                                                {"", "model.recompute_granularity=", 94, 5},
                                                {"", "mixed_precision=", 87, 15},
                                                {"", "mixed_precision.fp8=", 25, 5},
                                                {"", " moe", 205, 33},
                                                {"", " moe_collapsed", 35, 4},
                                                {"", " moe_empty", 4, 1},
                                                {"", " moe_padded", 10, 2},
                                                {"", "dispatcher_type=allgather", 66, 13},
                                                {"", "dispatcher_type=alltoall", 90, 14},
                                                {"", " latent", 40, 5},
                                                {"", "_mtp ", 72, 13},
                                                {"", "m|", 35, 6},
                                                {STAND_IN, "", 71, 14},
                                                {STAND_IN, "dist.tp=", 15, 5},
                                                {STAND_IN, "dist.pp=", 33, 8},
                                                {STAND_IN, "dist.cp=", 9, 1},
                                                {STAND_IN, "dist.cp_comm_type=", 3, 0},
                                                {STAND_IN, SHARD "optim ", 8, 3},
                                                {STAND_IN, SHARD "optim_grads ", 7, 0},
                                                {STAND_IN, SHARD "optim_grads_params ", 10, 2},
                                                {STAND_IN, HYBRID, 3, 1},
                                                {STAND_IN, " moe", 16, 2},
                                                {STAND_IN, OFFLOAD(""), 14, 3},
                                                {"", FILES, 8, 2},
                                                {SIMULATED, "", 29, 3},
                                                {SIMULATED, "mixed_precision.fp8=", 4, 0},
                                                {SIMULATED, GRAPHS, 9, 2},
                                                {SIMULATED, " moe", 10, 0}}) {
    CAPTURE(device);
    CAPTURE(text);
    int found = 0, found_fast = 0;
    for (const Layout& layout : kLayouts) {
      const std::string row = std::string(" ") + layout.recipe + " " + layout.overrides + " ";
      if (row.find(device) == std::string::npos || row.find(text) == std::string::npos) continue;
      ++found, found_fast += layout.fast;
    }
    CHECK(found == all);
    CHECK(found_fast == fast);
  }
  if (world().rank() == 0) fs::remove_all(scratch());
}
