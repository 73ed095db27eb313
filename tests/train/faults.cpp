// Training on disks that fail, fill up, tear, forget and flip bits: whatever happens to a save, the run
// resumes from a valid checkpoint, and its losses are those of the run that nothing happened to.
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "../checkpoint/helpers.hpp"
#include "runs.hpp"
#include "support/faulty_disk.hpp"
#include "support/tiny.hpp"

using namespace capstan;
using namespace capstan::train;
using namespace capstan::checkpoint::test;
using capstan::testing::losses_of;
using capstan::testing::Report;
using checkpoint::FileSystem;
using checkpoint::Verification;

namespace {

config::Config small(bool async) {
  auto c = capstan::testing::tiny_config(true, 1);
  c.model.num_layers = 1, c.model.hidden_size = 16, c.model.ffn_hidden_size = 16, c.model.seq_length = 8;
  c.model.num_attention_heads = 2, c.model.num_query_groups = 1;
  c.model.max_position_embeddings = 8;
  c.train.train_iters = 6;
  c.checkpoint.save_interval = 2;
  c.checkpoint.most_recent_k = 1;
  c.checkpoint.async_save = async;
  c.logger.log_interval = 1;
  c.logger.tensorboard = false;
  c.validation.eval_interval.reset();
  return c;
}

// Trains to the end; the text of the error, empty when there was none.
std::string train_in(const fs::path& run, const config::Config& config, bool resume,
                     FileSystem* files = nullptr, Report* sink = nullptr) {
  const auto world = comm::World::single_process();
  Report silent;
  RunOptions options;
  options.run_dir = run;
  options.resume = resume ? Resume::automatic : Resume::no;
  options.recipe = {"tiny", "name: tiny\n", "name: tiny\n", "0", "capstan train tiny"};
  options.files = files;
  options.measure_rate = false;
  return error_of([&] { train::train(config, *world, options, sink ? *sink : silent); });
}

int64_t count_events(const fs::path& run, const std::string& event) {
  int64_t count = 0;
  records::read_metrics(run / "metrics.jsonl",
                        [&](const records::ReadRow& row) { count += row.event == event; });
  return count;
}

const std::vector<double>& expected() {
  static const std::vector<double> losses = [] {
    const TemporaryDirectory root;
    REQUIRE(train_in(root.path() / "run", small(false), false) == "");
    return losses_of(root.path() / "run");
  }();
  REQUIRE(losses.size() == 18);
  return losses;
}

void check_resume(const fs::path& run, const config::Config& config) {
  const auto search = checkpoint::find_latest(run / "checkpoints", Verification::content);
  REQUIRE_MESSAGE(search.refused.empty(), search.refused.front().reason);
  const std::string error = train_in(run, config, true);
  REQUIRE_MESSAGE(error.empty(), error);
  REQUIRE(losses_of(run) == expected());
  const auto after = checkpoint::find_latest(run / "checkpoints", Verification::content);
  REQUIRE(after.found);
  REQUIRE(after.found->step == 6);
  // No temporary files are left. A checkpoint that retention could not delete is still a valid checkpoint.
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    REQUIRE_MESSAGE(entry.path().filename().string().starts_with("step-"), entry.path().string());
    REQUIRE(checkpoint::verify(entry.path(), Verification::content).empty());
  }
}

int64_t operations_of(bool async) {
  const TemporaryDirectory root;
  FailingDisk disk(FailingDisk::Mode::count, 0);
  REQUIRE(train_in(root.path() / "run", small(async), false, &disk) == "");
  return disk.operations();
}

}  // namespace

TEST_CASE(
    "every operation of every save fails once, kills, tears or fills the disk: the run resumes, bit for "
    "bit") {
  for (const bool async : {false, true}) {
    const auto config = small(async);
    const int64_t total = operations_of(async);
    CHECK(total > 60);
    for (const auto mode : {FailingDisk::Mode::error_once, FailingDisk::Mode::dead,
                            FailingDisk::Mode::torn_then_dead, FailingDisk::Mode::full})
      for (int64_t n = 0; n < total; ++n) {
        CAPTURE(async);
        CAPTURE(static_cast<int>(mode));
        CAPTURE(n);
        const TemporaryDirectory root;
        FailingDisk disk(mode, n);
        Report sink;
        const std::string error = train_in(root.path() / "run", config, false, &disk, &sink);
        // Every failed save was reported, or it ended the run because it was the last one. (The last
        // operations of all delete files, which needs no space.)
        const bool space = mode == FailingDisk::Mode::full && n > total - 16;
        REQUIRE((holds(error, "injected") || !sink.warnings.empty() || space));
        check_resume(root.path() / "run", config);
      }
  }
}

TEST_CASE("the power fails at every operation of every save, unsynced writes are lost, torn and reordered") {
  std::mt19937 random(11);
  for (const bool async : {false, true}) {
    const auto config = small(async);
    const int64_t total = operations_of(async);
    for (int64_t n = 0; n <= total; ++n) {
      const TemporaryDirectory root;
      ForgetfulDisk disk(root.path() / "run/checkpoints");
      disk.power_fails_at(n);
      train_in(root.path() / "run", config, false, &disk);
      const auto reported = count_events(root.path() / "run", "save");
      for (int chance = 0; chance < 3; ++chance) {
        CAPTURE(async);
        CAPTURE(n);
        CAPTURE(chance);
        const fs::path after = root.path() / ("after" + std::to_string(chance));
        fs::create_directory(after);
        for (const auto& entry : fs::directory_iterator(root.path() / "run"))
          if (entry.path().filename() != "checkpoints") fs::copy(entry.path(), after);
        disk.materialize(after / "checkpoints", random);
        const auto search = checkpoint::find_latest(after / "checkpoints", Verification::content);
        // A checkpoint that was reported as saved exists.
        REQUIRE((search.found ? search.found->step : 0) >= 2 * reported);
        check_resume(after, config);
      }
    }
  }
}

TEST_CASE("a flipped bit in any file of a checkpoint: named, and the run resumes from the one before") {
  auto config = small(false);
  config.checkpoint.most_recent_k = -1;
  const TemporaryDirectory root;
  REQUIRE(train_in(root.path() / "run", config, false) == "");
  std::mt19937 random(3);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root.path() / "run/checkpoints/step-00000006"))
    names.push_back(entry.path().filename().string());
  CHECK(names.size() == 4);
  for (const auto& name : names)
    for (int chance = 0; chance < 6; ++chance) {
      CAPTURE(name);
      const fs::path run = root.path() / ("flipped-" + name + std::to_string(chance));
      fs::copy(root.path() / "run", run, fs::copy_options::recursive);
      const fs::path file = run / "checkpoints/step-00000006" / name;
      std::string content = slurp(file);
      const size_t at = random() % content.size();
      content[at] = static_cast<char>(content[at] ^ (1 << random() % 8));
      spill(file, content);
      Report sink;
      REQUIRE(train_in(run, config, true, nullptr, &sink) == "");
      REQUIRE(sink.warnings.size() == 1);
      REQUIRE_MESSAGE(holds(sink.warnings[0], "not resumed from step-00000006"), sink.warnings[0]);
      REQUIRE_MESSAGE(holds(sink.warnings[0], name), sink.warnings[0]);
      bool said = false;
      for (const auto& line : sink.lines) said |= holds(line, "step-00000004 at step 4");
      REQUIRE(said);
      REQUIRE(count_events(run, "checkpoint_refused") == 1);
      REQUIRE(losses_of(run) == expected());
      REQUIRE(checkpoint::verify(run / "checkpoints/step-00000006", Verification::content)
                  .empty());  // saved anew
    }
}

TEST_CASE("a step that is asked for by number is read and hashed before it is believed") {
  auto config = small(false);
  const TemporaryDirectory root;
  REQUIRE(train_in(root.path() / "run", config, false) == "");
  const fs::path shard = root.path() / "run/checkpoints/step-00000006/rank-00000.safetensors";
  std::string content = slurp(shard);
  content[content.size() - 9] = static_cast<char>(content[content.size() - 9] ^ 4);
  spill(shard, content);
  config.checkpoint.load = config::Path{};
  config.checkpoint.load->resolved = (root.path() / "run").string();
  config.checkpoint.ckpt_step = 6;
  config.train.train_iters = 8;
  CHECK(holds(train_in(root.path() / "other", config, false), "rank-00000.safetensors"));
}

TEST_CASE(
    "a full disk: training goes on, the old checkpoint stays, it is said at every interval, and cured it is "
    "saved") {
  for (const bool async : {false, true}) {
    CAPTURE(async);
    auto config = small(async);
    config.train.train_iters = 10;
    FailingDisk disk(FailingDisk::Mode::full, operations_of(false) / 3 + 2);  // in the second save
    const TemporaryDirectory root;
    Report sink;
    sink.on_warning = [&](const std::string&) {
      const auto search = checkpoint::find_latest(root.path() / "run/checkpoints", Verification::content);
      CHECK(search.found);
      CHECK(search.found->step == 2);
      for (const auto& entry :
           fs::directory_iterator(root.path() / "run/checkpoints"))  // its space is free again
        CHECK_MESSAGE(entry.path().filename() == "step-00000002", entry.path().string());
      if (sink.warnings.size() == 3) disk.cure();
    };
    CHECK(train_in(root.path() / "run", config, false, &disk, &sink) == "");
    CHECK(sink.warnings.size() == 3);  // steps 4, 6 and 8
    for (const auto& text : sink.warnings) CHECK_MESSAGE(holds(text, "no space left on device"), text);
    CHECK(count_events(root.path() / "run", "save_failed") == 3);
    CHECK(checkpoint::find_latest(root.path() / "run/checkpoints", Verification::content).found->step == 10);
  }
}

// Every operation takes its time.
class SlowDisk final : public PassingDisk {
 public:
  std::unique_ptr<File> create(const fs::path& path) override {
    wait();
    return PassingDisk::create(path);
  }
  void make_directories(const fs::path& path) override {
    wait();
    PassingDisk::make_directories(path);
  }
  void sync_directory(const fs::path& path) override {
    wait();
    PassingDisk::sync_directory(path);
  }
  void rename_new(const fs::path& from, const fs::path& to) override {
    wait();
    PassingDisk::rename_new(from, to);
  }

 private:
  static void wait() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }
};

TEST_CASE(
    "an asynchronous save on a slow disk: steps go on beside it, the next save waits, the last is waited "
    "for") {
  auto config = small(true);
  config.train.train_iters = 400;
  config.checkpoint.save_interval = 399;
  SlowDisk disk;
  const TemporaryDirectory root;
  REQUIRE(train_in(root.path() / "run", config, false, &disk) == "");
  // 399 is written while nothing but step 400 is left: the last save waits for it, and both are there.
  CHECK(count_events(root.path() / "run", "save") == 2);
  CHECK(checkpoint::list_checkpoints(root.path() / "run/checkpoints").front().step == 400);
  config.train.train_iters = 3000;
  config.checkpoint.save_interval = 1000;
  REQUIRE(train_in(root.path() / "long", config, false, &disk) == "");
  double seconds = 0, stall = 0;
  int64_t saves = 0, steps_before_told = 0, last = 0;
  records::read_metrics(root.path() / "long/metrics.jsonl", [&](const records::ReadRow& row) {
    if (row.event.empty()) last = *row.step;
    if (row.event != "save" || *row.step == 3000) return;
    ++saves;
    seconds += row.number("seconds");
    stall += row.number("stall_seconds");
    steps_before_told += last - *row.step;
  });
  CHECK(saves == 2);
  CHECK(seconds > 2 * 0.05);         // six slow operations at least
  CHECK(stall < 0.5 * seconds);      // of which the steps saw little
  CHECK(steps_before_told > 2 * 5);  // and went on
}
