// Asynchronous saves and anomaly detection, on any number of ranks.
#include "train/trainer/anomaly.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <thread>

#include "base/error.hpp"
#include "base/file.hpp"
#include "comm/collective_errors.hpp"
#include "comm/reduce.hpp"
#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/faulty_disk.hpp"
#include "support/main_parameters.hpp"
#include "support/running.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/records/metrics.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_runner.hpp"
#include "train/trainer/trainer.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::testing::tiny_config;
namespace fs = std::filesystem;
using config::SpikeAction;

namespace {

using test::plan_in;
using test::Running;
using test::world;

template <class D>
config::Config config_on() {
  auto config = tiny_config(true, world().size());
  config.train.device = test::device_kind(D::type);
  return config;
}

void poison(Running& r, const std::string& ending) {
  for (const auto& p : r.runner.model().parameters()) {
    if (!p->name().ends_with(ending)) continue;
    auto values = test::main_of(r.runner.store(), *p).to_host<float>();
    values[values.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    test::main_of(r.runner.store(), *p).copy_from_host_bytes(std::as_bytes(std::span(values)));
    return;
  }
  FAIL("no parameter " << ending);
}

std::string text_of(const Anomaly& event, const std::string& key) {
  for (const auto& [name, value] : event.texts)
    if (name == key) return value;
  return {};
}

// Flips one bit of one operation's output, in the passes that are asked for, on one rank.
class FlipOnce final : public TapeObserver {
 public:
  explicit FlipOnce(int64_t at) : at_(at) {}
  void observe(const TapeEvent&) override {}
  void values(char phase, const std::string&, std::span<const Parameter* const>,
              std::span<const Tensor> tensors) override {
    if (phase != 'F' || seen_++ != at_ || tensors.empty()) return;
    auto values = tensors[0].to_host<float>();
    values[1] += values[1] == 0 ? 1.0f : values[1];
    tensors[0].copy_from_host_bytes(std::as_bytes(std::span(values)));
  }

 private:
  int64_t at_, seen_ = 0;
};

}  // namespace

TEST_CASE("an asynchronous save holds the state at its step, whatever training does meanwhile") {
  for (const auto precision : {config::Precision::fp32, config::Precision::bf16}) {
    auto config = tiny_config(true, world().size());
    config.mixed_precision.params_dtype = precision;
    const test::SharedDirectory root;
    Running r(config);
    Saver saver(world(), r.runner.store(), r.runner.optimizer(), true, r.runner.device());
    CHECK(r.runner.device().host_memory().now_by_category[static_cast<size_t>(MemoryCategory::snapshot)] > 0);
    for (int i = 0; i < 3; ++i) r.step();
    const int64_t requests = r.runner.device().memory().system_requests;
    saver.begin(plan_in(root.path()), r.runner.state());
    CHECK(r.runner.device().memory().system_requests == requests);  // the copies' memory is there already
    CHECK(saver.busy());
    std::vector<double> full;
    for (int i = 0; i < 4; ++i) full.push_back(r.step().loss);
    const auto ended = saver.finish();
    REQUIRE(ended);
    CHECK_MESSAGE(ended->error.empty(), ended->error);
    CHECK(ended->step == 3);
    CHECK(ended->stall_seconds <= ended->seconds);
    CHECK(!saver.busy());
    CHECK(checkpoint::verify(ended->directory, checkpoint::Verification::content).empty());
    Running other(config);
    test::load_into(other.runner, ended->directory);
    other.open_loader();
    std::vector<double> rest;
    for (int i = 0; i < 4; ++i) rest.push_back(other.step().loss);
    CHECK(rest == full);
    CHECK(other.parameters() == r.parameters());
  }
}

namespace {
// Lets no thread but its own create a file before it may: a disk as slow as a test needs it.
class HeldDisk final : public checkpoint::test::PassingDisk {
 public:
  void release() {
    held_ = false;
    held_.notify_all();
  }
  std::unique_ptr<File> create(const fs::path& path) override {
    if (std::this_thread::get_id() != owner_) held_.wait(true);
    return PassingDisk::create(path);
  }

 private:
  const std::thread::id owner_ = std::this_thread::get_id();
  std::atomic<bool> held_{true};
};

std::map<std::string, std::string> tensor_files(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.path().extension() == ".safetensors")
      files[fs::relative(entry.path(), directory).string()] = read_file(entry.path(), 1 << 24);
  return files;
}
}  // namespace

TEST_CASE("an asynchronous save on the checked device writes the CPU's bytes while training goes on") {
  const test::SharedDirectory cpu_root, checked_root;
  std::map<std::string, std::string> files;
  std::vector<double> losses;
  for (const auto kind : {config::DeviceKind::cpu, config::DeviceKind::checked}) {
    auto config = tiny_config(true, world().size());
    config.mixed_precision.params_dtype = config::Precision::bf16;
    config.train.device = kind;
    Running r(config);
    HeldDisk disk;
    Saver saver(world(), r.runner.store(), r.runner.optimizer(), true, r.runner.device());
    struct Release {  // before the saver waits for its thread, also when a step throws
      HeldDisk& disk;
      ~Release() { disk.release(); }
    } release{disk};
    for (int i = 0; i < 3; ++i) r.step();
    SavePlan plan = plan_in((kind == config::DeviceKind::cpu ? cpu_root : checked_root).path());
    plan.files = &disk;
    saver.begin(plan, r.runner.state());
    std::vector<double> meanwhile;
    for (int i = 0; i < 4; ++i) meanwhile.push_back(r.step().loss);
    CHECK(saver.busy());
    CHECK(!saver.ready());  // not one file is there, and four steps have been taken
    disk.release();
    const auto ended = saver.finish();
    REQUIRE(ended);
    CHECK_MESSAGE(ended->error.empty(), ended->error);
    CHECK(ended->step == 3);
    CHECK(checkpoint::verify(ended->directory, checkpoint::Verification::content).empty());
    const auto written = tensor_files(ended->directory);
    CHECK(!written.empty());
    if (kind == config::DeviceKind::cpu) {
      files = written;
      losses = meanwhile;
    } else {
      CHECK((written == files));
      CHECK(meanwhile == losses);
    }
  }
}

TEST_CASE("the save ends at step boundaries; a failing rank is reported on all ranks and leaves nothing") {
  const auto config = tiny_config(true, world().size());
  const test::SharedDirectory root;
  Running r(config);
  Saver saver(world(), r.runner.store(), r.runner.optimizer(), true, r.runner.device());
  r.step();
  auto plan = plan_in(root.path());
  checkpoint::test::FailingDisk disk(checkpoint::test::FailingDisk::Mode::error_once, 4);
  if (world().rank() == world().size() - 1) plan.files = &disk;
  saver.begin(plan, r.runner.state());
  auto ended = saver.finish();
  REQUIRE(ended);
  CHECK_MESSAGE(ended->error.find("injected") != std::string::npos, ended->error);
  if (world().size() > 1) CHECK(ended->error.find("rank 1: ") == 0);
  world().communicator().barrier();
  CHECK(fs::is_empty(root.path()));
  world().communicator().barrier();  // the other rank looks before this one begins the next save

  plan.files = nullptr;
  saver.begin(plan, r.runner.state());
  ended.reset();
  for (int boundary = 0; boundary < 100'000 && !ended; ++boundary) {
    double ready = saver.busy() && saver.ready() ? 1 : 0;
    ready = comm::all_reduce(world().communicator(), ready);
    if (static_cast<int>(ready) == world().size()) ended = saver.advance();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE(ended);
  CHECK(ended->error.empty());
  CHECK(checkpoint::verify(root.path() / "step-00000001", checkpoint::Verification::content).empty());
}

TEST_CASE("the estimated memory holds the copies of an asynchronous save") {
  auto config = tiny_config(true, 1);
  const auto without = estimate_step(config);
  config.checkpoint.save_interval = 10;
  config.checkpoint.async_save = true;
  const auto with = estimate_step(config);
  const auto snapshot = with.memory.now_by_category[static_cast<size_t>(MemoryCategory::snapshot)];
  CHECK(snapshot > 0);
  CHECK(with.memory.total() == without.memory.total() + snapshot);
  if (world().size() == 1) {
    Running r(config);
    const Saver saver(world(), r.runner.store(), r.runner.optimizer(), true, r.runner.device());
    CHECK(r.runner.device().host_memory().now_by_category[static_cast<size_t>(MemoryCategory::snapshot)] ==
          snapshot);
  }
}

TEST_CASE_TEMPLATE("what is not finite is located: parameter, first operation, first gradient, and the rank",
                   D, EVERY_DEVICE) {
  for (const std::string place : {"layers.1.mlp.linear_fc2.weight",
                                  "layers.0.self_attention.linear_qkv.weight", "final_layernorm.weight"}) {
    const auto config = config_on<D>();
    Running r(config);
    r.step();
    // One faulty rank is enough.
    const bool here = world().rank() == world().size() - 1;
    if (here) poison(r, place);
    const auto before = r.runner.optimizer().steps();
    try {
      r.step();
      FAIL("expected an error");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::failed);
      CHECK(error.message().find("step 2: the loss is nan") == 0);
      CHECK_MESSAGE(error.message().find(place) != std::string::npos, error.message());
    }
    REQUIRE(r.runner.failure_anomalies().size() == 1);
    const Anomaly& event = r.runner.failure_anomalies()[0];
    CHECK(event.event == "not_finite");
    CHECK(text_of(event, "parameter").ends_with(place));
    CHECK_MESSAGE(text_of(event, "operation").find(place) != std::string::npos, text_of(event, "operation"));
    CHECK(text_of(event, "operation").find("micro-batch 1 of ") != std::string::npos);
    CHECK(!text_of(event, "gradient").empty());
    if (world().size() > 1) CHECK(event.text.find("on rank 1") != std::string::npos);
    CHECK(r.runner.optimizer().steps() == before);
    CHECK(r.runner.state().step == 1);
  }
}

TEST_CASE("rows of experts that are not in use are not taken for values that are not finite") {
  auto config = tiny_config(true, world().size());
  config.train.device = config::DeviceKind::checked;  // fills new memory with NaN
  config.model.num_moe_experts = 4;
  config.model.moe_ffn_hidden_size = 24;
  config.model.moe_expert_capacity_factor = 0.5;
  config.dist.expert_model_parallel_size = 1;
  config.dist.expert_tensor_parallel_size = 1;
  Running r(config);
  r.step();
  const std::string place = "layers.1.self_attention.linear_proj.weight";
  poison(r, place);
  CHECK_THROWS_AS(r.step(), Error);
  REQUIRE(r.runner.failure_anomalies().size() == 1);
  const std::string operation = text_of(r.runner.failure_anomalies()[0], "operation");
  CHECK_MESSAGE(operation.find(place) != std::string::npos, operation);
}

TEST_CASE_TEMPLATE("spikes: off, warn, skip, rewind; the same on all ranks", D, FAST_DEVICES) {
  for (const auto action : {SpikeAction::off, SpikeAction::warn, SpikeAction::skip, SpikeAction::rewind})
    for (const bool loss : {false, true}) {
      CAPTURE(static_cast<int>(action));
      CAPTURE(loss);
      auto config = config_on<D>();
      (loss ? config.resilience.loss_spike_action : config.resilience.grad_norm_spike_action) = action;
      Running r(config);
      r.step();
      // The recent values are far lower, so the next step is a spike. With one entry less it is none.
      auto& recent = loss ? r.runner.state().recent_losses : r.runner.state().recent_norms;
      recent.assign(15, 1e-3);
      const auto before = r.parameters();
      const TrainState then = r.runner.state();
      Running calm(config);
      calm.step();
      (loss ? calm.runner.state().recent_losses : calm.runner.state().recent_norms).assign(15, 1e-3);
      CHECK(calm.step().anomalies.empty());
      recent.push_back(1e-3);
      const StepResult result = r.step();
      CHECK(result.anomalies.size() == (action == SpikeAction::off ? 0 : 1));
      if (action != SpikeAction::off) {
        CHECK(result.anomalies[0].event == (loss ? "loss_spike" : "grad_norm_spike"));
        CHECK(result.anomalies[0].text.find("more than 10 times the mean 0.001 of the 16 steps before") !=
              std::string::npos);
      }
      const bool updates = action == SpikeAction::off || action == SpikeAction::warn;
      CHECK((r.parameters() != before) == updates);
      CHECK(result.skipped == (action == SpikeAction::skip));
      CHECK(result.rewind == (action == SpikeAction::rewind));
      CHECK(r.runner.state().step == (action == SpikeAction::rewind ? 1 : 2));
      CHECK((r.runner.state().schedule_samples != then.schedule_samples) == updates);
      CHECK(r.runner.optimizer().steps() == (updates ? 2 : 1));
      if (action == SpikeAction::warn) CHECK(recent.size() == 17);
      if (action == SpikeAction::skip) CHECK(recent.size() == 16);
      const auto digests = comm::gather_texts(
          world().communicator(),
          std::to_string(r.parameters()[7]) + (result.skipped ? "s" : "") + (result.rewind ? "r" : ""));
      for (const auto& digest : digests) CHECK(digest == digests[0]);
    }
}

TEST_CASE_TEMPLATE(
    "a suspicious step is computed again: the same bits are the data's, other bits are the hardware's, by "
    "rank",
    D, EVERY_DEVICE) {
  for (const auto mode : {config::RerunMode::validate_results, config::RerunMode::report_stats}) {
    auto config = config_on<D>();
    config.resilience.rerun_mode = mode;
    config.resilience.loss_spike_action = SpikeAction::warn;
    Running sound(config), plain(config_on<D>());
    sound.step(), plain.step();
    sound.runner.state().recent_losses.assign(16, 1e-3);
    const StepResult result = sound.step();
    plain.step();
    REQUIRE(result.anomalies.size() == 2);
    CHECK(result.anomalies[1].event == "rerun");
    CHECK(text_of(result.anomalies[1], "cause") == "data");
    CHECK(sound.parameters() == plain.parameters());  // computing again changes nothing

    Running broken(config);
    broken.step();
    broken.runner.state().recent_losses.assign(16, 1e-3);
    const auto before = broken.parameters();
    FlipOnce flip(5);
    if (world().rank() == world().size() - 1) broken.runner.observe(&flip);
    try {
      broken.step();
      FAIL("expected an error");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::rank_failure);
      CHECK_MESSAGE(
          error.message().find("gave different bits on rank " + std::to_string(world().size() - 1) +
                               " when computed again: the cause is the hardware") != std::string::npos,
          error.message());
    }
    REQUIRE(broken.runner.failure_anomalies().size() == 2);
    CHECK(text_of(broken.runner.failure_anomalies()[1], "cause") == "hardware");
    CHECK(broken.runner.failure_anomalies()[1].numbers.size() ==
          (mode == config::RerunMode::report_stats ? 6 : 2));
    CHECK(broken.parameters() == before);
  }
}

// ---- the trainer ------------------------------------------------------------------------------------------

namespace {
struct Silent final : ProgressSink {
  std::vector<std::string> warnings;
  void line(const std::string&) override {}
  void warning(const std::string& text) override { warnings.push_back(text); }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }
};
Outcome train_in(const fs::path& run, const config::Config& config, bool resume, Silent& sink,
                 std::function<bool(const StepReport&)> on_step = {}) {
  RunOptions options;
  options.on_step = std::move(on_step);
  options.run_dir = run;
  options.resume = resume ? Resume::automatic : Resume::no;
  options.recipe = {"tiny", "name: tiny\n", "name: tiny\n", "0", "capstan train tiny"};
  options.measure_rate = false;
  return train::train(config, world(), options, sink);
}
struct Rows {
  std::vector<double> losses;
  std::vector<records::ReadRow> rewinds, spikes;
};
Rows rows_of(const fs::path& run) {
  Rows rows;
  world().communicator().barrier();
  records::read_metrics(run / "metrics.jsonl", [&](const records::ReadRow& row) {
    if (row.event.empty())
      rows.losses.push_back(static_cast<double>(*row.step)), rows.losses.push_back(row.number("loss"));
    if (row.event == "rewind") rows.rewinds.push_back(row);
    if (row.event == "grad_norm_spike") rows.spikes.push_back(row);
  });
  world().communicator().barrier();
  return rows;
}
// A run with spikes: the factor is so low that some batches are above it.
template <class D>
config::Config config_with_spikes(SpikeAction action) {
  auto config = config_on<D>();
  config.train.train_iters = 24;
  config.checkpoint.save_interval = 4;
  config.checkpoint.async_save = true;
  config.logger.log_interval = 1;
  config.validation.eval_interval.reset();
  config.resilience.grad_norm_spike_action = action;
  config.resilience.grad_norm_spike_factor = 1.1;
  config.resilience.spike_window = 3;
  config.resilience.max_rewinds = 50;
  config.optimizer.lr = 1e-5;
  config.optimizer.min_lr = 1e-5;
  return config;
}
}  // namespace

TEST_CASE_TEMPLATE("a spike without a checkpoint to return to is a step like one that is skipped", D,
                   FAST_DEVICES) {
  struct ReportedSteps {
    std::vector<int64_t> steps, skipped;
    std::vector<double> losses;
  };
  const test::SharedDirectory root;
  Silent sink;
  const auto run = [&](SpikeAction action) {
    auto config = config_with_spikes<D>(action);
    config.checkpoint.save_interval = 1000;
    const fs::path path = root.path() / config::enum_name(action);
    ReportedSteps seen;
    train_in(path, config, false, sink, [&](const StepReport& report) {
      seen.steps.push_back(report.step);
      if (report.update_skipped) seen.skipped.push_back(report.step);
      return true;
    });
    const Rows rows = rows_of(path);
    CHECK(rows.rewinds.empty());
    CHECK(rows.spikes.size() == seen.skipped.size());
    seen.losses = rows.losses;
    return seen;
  };
  const ReportedSteps skip = run(SpikeAction::skip);
  REQUIRE(skip.skipped.size() > 0);
  REQUIRE(skip.steps.size() == 24);
  for (size_t i = 0; i < 24; ++i) CHECK(skip.steps[i] == static_cast<int64_t>(i + 1));
  const ReportedSteps rewind = run(SpikeAction::rewind);
  CHECK(rewind.steps == skip.steps);
  CHECK(rewind.skipped == skip.skipped);
  CHECK(rewind.losses == skip.losses);
}

TEST_CASE_TEMPLATE("a run rewinds past the batch of a spike, keeps its records, and resumes bit for bit", D,
                   FAST_DEVICES) {
  auto config = config_with_spikes<D>(SpikeAction::rewind);
  const test::SharedDirectory root;
  Silent sink;
  CHECK(train_in(root.path() / "uninterrupted", config, false, sink).step == 24);
  const Rows full = rows_of(root.path() / "uninterrupted");
  REQUIRE(full.rewinds.size() > 0);
  CHECK(full.spikes.size() == full.rewinds.size());
  // A file of events for the start and for each rewind, which hides the events of the steps that it undoes.
  size_t event_files = 0;
  for (const auto& entry : fs::directory_iterator(root.path() / "uninterrupted"))
    event_files += entry.path().filename().string().starts_with("events.out");
  CHECK(event_files == 1 + full.rewinds.size());
  REQUIRE(full.losses.size() == 48);  // every step once
  for (size_t i = 0; i < 24; ++i) CHECK(full.losses[2 * i] == static_cast<double>(i + 1));
  const auto& first = full.rewinds.front();
  CHECK(first.number("consumed_samples") == first.number("from_step") * 4);  // past the batch of the spike
  CHECK(*first.step % 4 == 0);
  CHECK(first.number("from_step") > static_cast<double>(*first.step));
  // The row stands where the run goes on, and names the step of the anomaly, as the warning does.
  CHECK(*full.spikes.front().step == *first.step);
  CHECK(full.spikes.front().number("seen_at_step") == first.number("from_step"));
  if (world().rank() == 0)
    CHECK(sink.warnings.front().starts_with("step " +
                                            std::to_string(static_cast<int64_t>(first.number("from_step"))) +
                                            ": the gradient norm is "));
  // In parts: stopped at each checkpoint.
  config.train.exit_interval = 4;
  for (int start = 0; start < 60; ++start)
    if (train_in(root.path() / "parts", config, start > 0, sink).ended == Ended::finished) break;
  const Rows parts = rows_of(root.path() / "parts");
  CHECK(parts.losses == full.losses);
  CHECK(parts.rewinds.size() == full.rewinds.size());
  // No more rewinds than allowed.
  config.train.exit_interval.reset();
  config.resilience.max_rewinds = 0;
  try {
    train_in(root.path() / "none", config, false, sink);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK_MESSAGE(error.message().find("resilience.max_rewinds") != std::string::npos, error.message());
  }
  // The row of that spike says what was done.
  std::string last_action;
  records::read_metrics(root.path() / "none/metrics.jsonl", [&](const records::ReadRow& row) {
    for (const auto& [name, text] : row.texts)
      if (name == "action") last_action = text;
  });
  CHECK(last_action == "stop");
}
