// Saves of eight ranks under tensor and pipeline parallelism and ZeRO, which a crash of all of them, a
// failure or a full disk ends at each of their operations: the run resumes from a valid checkpoint,
// and its losses are those of the run that nothing happened to.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>

#include "checkpoint/store.hpp"
#include "runs.hpp"
#include "support/errors.hpp"
#include "support/faulty_disk.hpp"
#include "support/temporary_directory.hpp"
#include "support/worlds.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::checkpoint::test::FailingDisk;
using capstan::test::error_of;
using capstan::test::world;
using capstan::testing::losses_of;
using capstan::testing::Report;
using checkpoint::Verification;
namespace fs = std::filesystem;

namespace {

const char* const kRecipe = R"(
name: tiny
model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, num_query_groups: 1,
        seq_length: 8, vocab_size: 32, make_vocab_size_divisible_by: 1, position_embedding_type: rope,
        normalization: RMSNorm, activation_func: silu, gated_linear_unit: true, add_bias_linear: false,
        hidden_dropout: 0.0, attention_dropout: 0.0}
dist: {world_size: 8, tp: 2, pp: 2}
train: {micro_batch_size: 1, global_batch_size: 4, train_iters: 2, threads: 1, device: cpu}
optimizer: {lr: 1e-2, min_lr: 1e-3}
checkpoint: {save_interval: 1, most_recent_k: 1}
dataset: {kind: mock}
validation: {eval_interval: null}
logger: {log_interval: 1, tensorboard: false}
)";

// A directory that all ranks share, and a number that they count together.
class Shared {
 public:
  Shared() {
    std::string path(256, '\0');
    if (world().rank() == 0) {
      directory_ = std::make_unique<test::TemporaryDirectory>();
      path.replace(0, directory_->path().string().size(), directory_->path().string());
      std::ofstream(directory_->path() / "counter") << std::string(sizeof(int64_t), '\0');
      std::ofstream(directory_->path() / "tiny.yaml") << kRecipe;
    }
    world().communicator().broadcast(path.data(), static_cast<int64_t>(path.size()), 0);
    path_ = path.c_str();
    const int file = ::open((path_ / "counter").c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(file >= 0);
    void* const memory = ::mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    REQUIRE(memory != MAP_FAILED);
    counter_ = static_cast<std::atomic<int64_t>*>(memory);
    static_assert(std::atomic<int64_t>::is_always_lock_free);
  }
  ~Shared() {
    world().communicator().barrier();
    ::munmap(counter_, sizeof(int64_t));
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  const fs::path& path() const { return path_; }
  // From 0, on every rank. Collective.
  std::atomic<int64_t>* counter() {
    world().communicator().barrier();
    if (world().rank() == 0) *counter_ = 0;
    world().communicator().barrier();
    return counter_;
  }

 private:
  // Null on other ranks than rank 0.
  std::unique_ptr<test::TemporaryDirectory> directory_;
  fs::path path_;
  std::atomic<int64_t>* counter_ = nullptr;
};

// Trains to the end; the text of the error, empty when there was none.
std::string train_in(const fs::path& run, const config::Resolution& resolution, bool resume, Report& report,
                     checkpoint::FileSystem* files = nullptr) {
  auto options = capstan::testing::run_options(resolution, run, resume ? Resume::automatic : Resume::no);
  options.files = files;
  const std::string error = error_of([&] { train::train(resolution.config, world(), options, report); });
  world().communicator().barrier();
  return error;
}

// One way of saving, and the run that nothing happens to.
struct Saving {
  bool async;
  config::Resolution resolution;
  // Losses.
  std::vector<double> expected;
  // Number of operations of all ranks.
  int64_t operations = 0;

  Saving(Shared& shared, bool asynchronous)
      : async(asynchronous),
        resolution(capstan::testing::resolve_recipe(
            shared.path() / "tiny.yaml", {std::string("checkpoint.async_save=") + (async ? "true" : "false"),
                                          std::string("ddp.data_parallel_sharding_strategy=") +
                                              (async ? "optim_grads_params" : "optim")})) {
    resolution.require_ok();
    const fs::path run = shared.path() / (async ? "async" : "sync");
    FailingDisk counting(FailingDisk::Mode::count, 0, shared.counter());
    Report report;
    REQUIRE(train_in(run, resolution, false, report, &counting) == "");
    operations = counting.operations();
    expected = losses_of(run);
    REQUIRE(expected.size() == 6);
    CHECK(operations > 100);
  }
};

void check_failure(Shared& shared, const Saving& saving, FailingDisk::Mode mode, int64_t n) {
  CAPTURE(saving.async);
  CAPTURE(static_cast<int>(mode));
  CAPTURE(n);
  const bool first = world().rank() == 0;
  const fs::path run = shared.path() / "run";
  FailingDisk disk(mode, n, shared.counter());
  Report report, silent;
  const std::string error = train_in(run, saving.resolution, false, report, &disk);
  if (first) {
    // A save that failed was reported, or it ended the run because it was the last. (The last operations of
    // all delete, which needs no space.)
    const bool space = mode == FailingDisk::Mode::full && n > saving.operations - 24;
    REQUIRE((error.find("injected") != std::string::npos || !report.warnings.empty() || space));
    const auto search = checkpoint::find_latest(run / "checkpoints", Verification::content);
    REQUIRE_MESSAGE(search.refused.empty(), search.refused.front().reason);
  }
  world().communicator().barrier();
  const std::string again = train_in(run, saving.resolution, true, silent);
  REQUIRE_MESSAGE(again.empty(), again);
  if (first) {
    REQUIRE(losses_of(run) == saving.expected);
    const auto search = checkpoint::find_latest(run / "checkpoints", Verification::content);
    REQUIRE(search.found);
    REQUIRE(search.found->step == 2);
    for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
      REQUIRE_MESSAGE(entry.path().filename().string().starts_with("step-"), entry.path().string());
      REQUIRE(checkpoint::verify(entry.path(), Verification::content).empty());
    }
    fs::remove_all(run);
  }
  world().communicator().barrier();
}

}  // namespace

TEST_CASE(
    "a crash at every operation of every save of tensor, pipeline and data ranks: the run resumes, bit for "
    "bit") {
  using Mode = FailingDisk::Mode;
  Shared shared;
  const Saving sync(shared, false), async(shared, true);
  int64_t crashes = 0;
  for (const Saving* saving : {&sync, &async})
    for (int64_t n = 0; n < saving->operations; ++n) {
      // Eight ranks do the same: each kind of operation meets both crashes.
      check_failure(shared, *saving, n % 2 == 0 ? Mode::dead : Mode::torn_then_dead, n);
      ++crashes;
      // The others are tested on one rank for every operation.
      if (n % 16 == 0) check_failure(shared, *saving, n % 32 == 0 ? Mode::error_once : Mode::full, n);
    }
  if (world().rank() == 0)
    MESSAGE(crashes << " crashes, of " << sync.operations << " operations of two synchronous saves and "
                    << async.operations << " of two asynchronous ones");
}
