// Training with optimizer state in host memory: the same bits on every layout, checkpoints that do not depend
// on it, memory as estimated, transfers and updates beside each other.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "checkpoint/reader.hpp"
#include "comm/reduce.hpp"
#include "support/devices.hpp"
#include "support/errors.hpp"
#include "support/preset_recipe.hpp"
#include "support/running.hpp"
#include "support/sanitized.hpp"
#include "train/setup/offload.hpp"
#include "train/setup/state.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/saver.hpp"

using namespace capstan;
using namespace capstan::train;
using test::Running;
using test::world;

namespace {

using Overrides = std::vector<std::string>;

Overrides with(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

config::Config offloaded(config::Config config, double fraction) {
  config.optimizer.optimizer_cpu_offload = true;
  config.optimizer.optimizer_offload_fraction = fraction;
  return config;
}

// With the state in files of `directory`, several chunks for each of the buckets of kBuckets.
config::Config in_files(config::Config config, double fraction, const std::filesystem::path& directory) {
  config = offloaded(std::move(config), fraction);
  config.optimizer.optimizer_offload_path = config::Path{directory.string(), directory.string()};
  config.optimizer.optimizer_offload_chunk_size = 1500;
  return config;
}

// Main parameters and moments of this rank, in the order of the parameters, whatever lies in host memory.
std::vector<std::vector<float>> state_of(StepRunner& runner) {
  std::vector<std::vector<float>> all(1 + runner.optimizer().state().size());
  const auto add = [](std::vector<float>& to, const Tensor& values) {
    const std::vector<float> here = values.to_floats();
    to.insert(to.end(), here.begin(), here.end());
  };
  for (const auto& shard : runner.store().parameter_shards()) {
    add(all[0], shard.values());
    if (shard.buffer < 0) continue;
    size_t next = 1;
    for (const auto& state : runner.optimizer().state())
      add(all[next++], runner.optimizer().values(state, shard.buffer, shard.begin, shard.range.count));
  }
  return all;
}

// Elements of this rank whose state lies in host memory.
int64_t offloaded_elements(const StepRunner& runner) {
  int64_t elements = 0;
  for (const auto& buffer : const_cast<StepRunner&>(runner).optimizer().buffers())
    if (buffer.host) elements += buffer.main.elements();
  return elements;
}

struct Trained {
  // Losses, gradient norms and numbers of zeros, whether a step was skipped.
  std::vector<double> numbers, parameter_norms;
  std::vector<std::vector<float>> state;
  MemoryUse device, host;
  // Waits of the host in each step: one, and those for transfers between ranks.
  std::vector<int64_t> waits;
  int64_t offloaded = 0;
  int64_t skipped = 0;
};

void add_step(const StepResult& result, Trained& trained) {
  // The norm of an overflow is not a number, which equals nothing.
  const double norm = std::isfinite(result.gradient_norm) ? result.gradient_norm : -1;
  trained.numbers.insert(trained.numbers.end(), {result.loss, norm});
  if (result.num_zeros) trained.numbers.push_back(static_cast<double>(*result.num_zeros));
  trained.numbers.push_back(result.skipped ? 1 : 0);
  trained.skipped += result.skipped ? 1 : 0;
  if (result.params_norm) trained.parameter_norms.push_back(*result.params_norm);
}

Trained run_steps(const config::Config& config, int steps) {
  Running r(config);
  Trained trained;
  for (int i = 0; i < steps; ++i) {
    const int64_t waits = r.runner.device().host_waits();
    const StepResult result = r.step();
    trained.waits.push_back(r.runner.device().host_waits() - waits);
    const bool reruns = config.resilience.grad_norm_spike_action != config::SpikeAction::off;
    if (world().size() == 1 && !reruns) CHECK(trained.waits.back() == 1);
    add_step(result, trained);
  }
  trained.device = r.runner.device().memory();
  trained.host = r.runner.device().memory(MemoryKind::host);
  trained.offloaded = offloaded_elements(r.runner);
  trained.state = state_of(r.runner);
  return trained;
}

struct Variant {
  const char* preset;
  Overrides overrides;
  // Some updates are skipped.
  bool skips = false;
};

// Few, small buckets: several in a model, and parameters in parts.
const Overrides kBuckets = {"ddp.bucket_size=5000", "scheduler.lr_warmup_iters=0"};
const std::vector<Variant>& variants() {
  static const std::vector<Variant> list = {
      {"bf16_mixed", {}},
      {"fp32", {"logger.log_params_norm=true", "logger.log_num_zeros_in_grad=true"}},
      {"fp16_mixed", {"mixed_precision.initial_loss_scale=1e30"}, true},
      {"bf16_mixed", {"optimizer.optimizer=lion", "optimizer.lr=1e-3", "~optimizer.adam_eps"}},
      {"fp32", {"optimizer.optimizer=sgd", "~optimizer.adam_eps", "resilience.rerun_mode=validate_results"}},
      {"bf16_mixed",
       {"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=fp8",
        "optimizer.exp_avg_sq_dtype=fp8"}},
      {"bf16_mixed",
       {"optimizer.use_precision_aware_optimizer=true", "optimizer.main_params_dtype=bf16",
        "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=fp8",
        "optimizer.stochastic_rounding=true"}},
      {"bf16_mixed",
       {"mixed_precision.fp8=hybrid", "mixed_precision.fp8_recipe=delayed",
        "mixed_precision.fp8_param_gather=true"}},
      {"bf16_mixed", {"peft=lora", "peft.random_base=true"}},
      {"fp32", {"optimizer.grad_norm_skip_threshold=1e-6"}, true},
      {"bf16_mixed",
       {"optimizer.use_precision_aware_optimizer=true", "optimizer.main_grads_dtype=bf16",
        "logger.log_num_zeros_in_grad=true"}},
  };
  return list;
}

// Layouts of the ranks of this test.
std::vector<Overrides> layouts() {
  const auto sharding = [](const char* strategy) {
    return std::string("ddp.data_parallel_sharding_strategy=") + strategy;
  };
  if (world().size() == 1) return {{}};
  return {{sharding("no_shard")},
          {sharding("optim"), "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"},
          {sharding("optim_grads"), "dist.distributed_backend=nccl_stand_in", "ddp.overlap_grad_reduce=true"},
          {sharding("optim_grads_params"), "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"},
          {sharding("optim"), "ddp.num_distributed_optimizer_instances=2",
           "ddp.outer_dp_sharding_strategy=optim"},
          {"dist.tp=2"},
          {"dist.pp=2"}};
}

// Calls run(variant, its number, overrides of the recipe): every variant on one rank and with ZeRO-3, and the
// first with every layout.
template <class Run>
void each_run(const Run& run) {
  const std::vector<Overrides> all = layouts();
  for (size_t l = 0; l < all.size(); ++l)
    for (size_t v = 0; v < variants().size(); ++v) {
      const Variant& variant = variants()[v];
      if (v != 0 && ((all.size() > 1 && l != 3) || test::kSanitized)) continue;
      CAPTURE(all[l]);
      CAPTURE(std::string(variant.preset));
      CAPTURE(variant.overrides);
      run(variant, v, with(with(kBuckets, all[l]), variant.overrides));
    }
}

// Three steps with the whole state on the device.
Trained expected_of(const config::Config& config, const Variant& variant) {
  Trained expected = run_steps(config, 3);
  CHECK((expected.skipped > 0) == variant.skips);
  return expected;
}

void check_same(const Trained& found, const Trained& expected) {
  CHECK(found.numbers == expected.numbers);
  CHECK(found.state == expected.state);
  CHECK(found.waits == expected.waits);
  CHECK(found.offloaded > 0);
  CHECK(expected.offloaded == 0);
  // Sums over other parts, in double.
  REQUIRE(found.parameter_norms.size() == expected.parameter_norms.size());
  for (size_t i = 0; i < found.parameter_norms.size(); ++i)
    CHECK(found.parameter_norms[i] == doctest::Approx(expected.parameter_norms[i]).epsilon(1e-13));
}

}  // namespace

TEST_CASE("training has the same bits with any part of the optimizer state in host memory") {
  each_run([](const Variant& variant, size_t number, const Overrides& overrides) {
    const config::Config config = test::resolve_preset<test::Checked>(variant.preset, overrides);
    const Trained expected = expected_of(config, variant);
    for (const double fraction : {0.3, 1.0}) {
      if (fraction == 1 && (number % 4 != 0 || test::kSanitized)) continue;
      CAPTURE(fraction);
      check_same(run_steps(offloaded(config, fraction), 3), expected);
    }
  });
}

TEST_CASE("training has the same bits with any part of the optimizer state in files") {
  const test::SharedDirectory directory;
  each_run([&](const Variant& variant, size_t number, const Overrides& overrides) {
    const config::Config config = test::resolve_preset<test::Checked>(variant.preset, overrides);
    const Trained expected = expected_of(config, variant);
    const double fraction = number % 2 == 0 ? 1 : 0.3;
    check_same(run_steps(in_files(config, fraction, directory.path()), 3), expected);
    // The stand-in for NCCL needs queues.
    if (test::kSanitized || config.dist.distributed_backend == config::DistributedBackend::nccl_stand_in)
      return;
    const config::Config on_cpu = test::resolve_preset<test::Cpu>(variant.preset, overrides);
    const Trained found = run_steps(in_files(on_cpu, fraction, directory.path()), 3);
    CHECK(found.numbers == expected.numbers);
    CHECK(found.state == expected.state);
    CHECK(found.offloaded > 0);
  });
  CHECK(std::filesystem::is_empty(directory.path()));
}

TEST_CASE("a step that is computed again updates offloaded state once") {
  config::Config config = test::resolve_preset<test::Checked>(
      "bf16_mixed", with(kBuckets, {"resilience.rerun_mode=validate_results", "resilience.spike_window=1",
                                    "resilience.grad_norm_spike_action=warn"}));
  // Every step after the first has a spike.
  config.resilience.grad_norm_spike_factor = 0.001;
  const Trained expected = run_steps(config, 3);
  CHECK(expected.waits[1] > expected.waits[0]);
  check_same(run_steps(offloaded(config, 0.3), 3), expected);
  const test::SharedDirectory directory;
  check_same(run_steps(in_files(config, 1, directory.path()), 3), expected);
}

TEST_CASE("an offloaded parameter that is not finite is named") {
  if (world().size() > 1) return;
  Running r(offloaded(test::resolve_preset<test::Checked>("bf16_mixed", kBuckets), 1));
  const std::string parameter = r.spoil_last_parameter();
  const std::string error = test::error_of([&] { r.step(); });
  CHECK(test::holds(error, "parameter `" + parameter + "` itself is not finite"));
  CHECK(test::holds(error, "first gradient: `"));
}

TEST_CASE("a parameter in a file that is not finite is named") {
  if (world().size() > 1) return;
  const test::SharedDirectory directory;
  Running r(in_files(test::resolve_preset<test::Checked>("bf16_mixed", kBuckets), 1, directory.path()));
  const std::string parameter = r.spoil_last_parameter();
  const std::string error = test::error_of([&] { r.step(); });
  CHECK(test::holds(error, "parameter `" + parameter + "` itself is not finite"));
}

TEST_CASE_TEMPLATE("the CPU's and the CUDA kernels update parts of one bucket", D, CUDA_KERNEL_DEVICES) {
  if (test::kSanitized || world().size() > 1) return;
  const test::SharedDirectory files;
  const config::Config config = test::resolve_preset<D>("bf16_mixed", kBuckets);
  const Trained expected = run_steps(config, 2);
  for (const config::Config& other : {offloaded(config, 0.3), in_files(config, 0.6, files.path())}) {
    const Trained found = run_steps(other, 2);
    CHECK(found.offloaded > 0);
    CHECK(found.numbers[0] == expected.numbers[0]);
    for (size_t i = 0; i < found.numbers.size(); ++i)
      CHECK(found.numbers[i] == doctest::Approx(expected.numbers[i]).epsilon(test::kOtherKernels));
    for (size_t i = 0; i < found.state[0].size(); ++i)
      REQUIRE(found.state[0][i] == doctest::Approx(expected.state[0][i]).epsilon(1e-3));
  }
}

TEST_CASE("a fraction of 0 offloads nothing, and an odd one complete blocks of fp8 moments") {
  const config::Config config = test::resolve_preset<test::Checked>("bf16_mixed", kBuckets);
  CHECK(run_steps(offloaded(config, 0), 1).device.peak == run_steps(config, 1).device.peak);
  for (const double fraction : {0.1, 0.37, 0.9}) {
    Running r(offloaded(config, fraction));
    int64_t elements = 0;
    for (const auto& buffer : r.runner.optimizer().buffers()) {
      elements += buffer.main.elements();
      if (!buffer.host) continue;
      const auto& first = buffer.ranges.front();
      CHECK(first.origin % kernels::kMomentBlock == 0);
    }
    // Each of the buckets is rounded up.
    const auto buckets = static_cast<double>(r.runner.store().gradient_buffers().size());
    const double least = fraction * static_cast<double>(elements) - buckets;
    const auto found = static_cast<double>(offloaded_elements(r.runner));
    CHECK(found >= least);
    CHECK(found <= least + buckets * (2 + kernels::kMomentBlock));
  }
}

namespace {

// Every tensor of a checkpoint, by name.
std::map<std::string, std::vector<std::byte>> tensors_in(const std::filesystem::path& directory) {
  auto reader = checkpoint::Reader::open(directory, checkpoint::Verification::content);
  std::map<std::string, std::vector<std::byte>> tensors;
  for (const std::string& name : reader.names()) {
    const checkpoint::StoredTensor& stored = *reader.find(name);
    std::vector<std::byte>& bytes = tensors[name];
    bytes.resize(static_cast<size_t>(stored.shape.elements() * size_of(stored.dtype)));
    reader.read(name, stored.dtype, full_region(stored.shape), bytes);
  }
  return tensors;
}

}  // namespace

TEST_CASE(
    "checkpoints do not depend on offload: runs resume bitwise with another part of the state on the host") {
  const Overrides moments = {"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16",
                             "optimizer.exp_avg_sq_dtype=fp8"};
  const std::string zero1 = "ddp.data_parallel_sharding_strategy=optim";
  std::vector<Variant> saved = {{"bf16_mixed", moments}, {"fp32", {zero1}}};
  if (test::kSanitized) saved.pop_back();
  for (const Variant& variant : saved) {
    const config::Config config =
        test::resolve_preset<test::Checked>(variant.preset, with(kBuckets, variant.overrides));
    const test::SharedDirectory root;
    const test::SharedDirectory files;
    const std::vector<config::Config> configs = {config, offloaded(config, 0.3), offloaded(config, 1),
                                                 in_files(config, 0.6, files.path())};
    std::vector<std::filesystem::path> directories;
    std::vector<std::vector<std::vector<float>>> ends;
    std::vector<double> losses;
    for (size_t i = 0; i < configs.size(); ++i) {
      Running r(configs[i]);
      r.step(), r.step();
      r.runner.device().synchronize();
      const int64_t copied = r.runner.device().copied_bytes(Queue::device_to_host);
      directories.push_back(test::save_in(root.path() / std::to_string(i), r.runner));
      // State in host memory is written as it is.
      const bool from_device = r.runner.device().copied_bytes(Queue::device_to_host) > copied;
      CHECK(from_device == (i != 2));
      losses.push_back(r.step().loss);
      ends.push_back(state_of(r.runner));
    }
    const auto expected = tensors_in(directories[0]);
    for (const auto& directory : directories) CHECK(tensors_in(directory) == expected);
    for (const auto& directory : directories)
      for (const config::Config& resumed : configs) {
        Running r(resumed);
        test::load_into(r.runner, directory);
        r.open_loader();
        CHECK(r.step().loss == losses[0]);
        CHECK(state_of(r.runner) == ends[0]);
      }
    for (const double loss : losses) CHECK(loss == losses[0]);
    for (const auto& end : ends) CHECK(end == ends[0]);
  }
}

TEST_CASE("an asynchronous save holds the offloaded state at its step") {
  const test::SharedDirectory root, files;
  const config::Config config = test::resolve_preset<test::Checked>("bf16_mixed", kBuckets);
  for (const config::Config& one : {offloaded(config, 0.3), in_files(config, 0.8, files.path())}) {
    const std::string name = one.optimizer.optimizer_offload_path ? "files" : "memory";
    Running r(one);
    Saver saver(world(), r.runner.store(), r.runner.optimizer(), true, r.runner.device());
    r.step(), r.step();
    const auto now = test::save_in(root.path() / name / "now", r.runner);
    saver.begin(test::plan_in(root.path() / name / "later"), r.runner.state());
    r.step(), r.step();
    const auto ended = saver.finish();
    REQUIRE(ended);
    CHECK_MESSAGE(ended->error.empty(), ended->error);
    CHECK(tensors_in(ended->directory) == tensors_in(now));
  }
}

TEST_CASE("with state in files the host's memory stays below a cap that state in memory exceeds") {
  if (world().size() > 1) return;
  const test::SharedDirectory files;
  for (const char* preset : {"bf16_mixed", "fp32"}) {
    CAPTURE(std::string(preset));
    const config::Config config =
        test::resolve_preset<test::Checked>(preset, {"model.hidden_size=96", "model.vocab_size=4000"});
    config::Config small = in_files(config, 1, files.path());
    small.optimizer.optimizer_offload_chunk_size = 32768;
    const Trained plain = run_steps(config, 3), in_memory = run_steps(offloaded(config, 1), 3);
    const Trained found = run_steps(small, 3);
    check_same(found, plain);
    CHECK(found.device.peak == in_memory.device.peak);
    // Three chunks of main parameters and moments, with the model's, and the gradients of two.
    const int64_t cap = int64_t{32768} * (3 * 14 + 2 * 4) + (int64_t{1} << 20);
    CHECK(in_memory.host.peak > 2 * cap);
    CHECK(found.host.peak < cap);
    const StepEstimate estimate = estimate_step(small);
    CHECK(static_cast<double>(estimate.state_file) ==
          doctest::Approx(static_cast<double>(12 * found.offloaded)).epsilon(0.1));
    CHECK(estimate.state_file >= 12 * found.offloaded);
    // Saves and data are estimated for a run with both.
    for (size_t c = 0; c < kMemoryCategories; ++c)
      if (c != static_cast<size_t>(MemoryCategory::snapshot) &&
          c != static_cast<size_t>(MemoryCategory::data))
        CHECK(found.host.peak_by_category[c] == estimate.host_memory.peak_by_category[c]);
  }
}

TEST_CASE_TEMPLATE("device and pinned memory of offloaded state are estimated within 2 %", D,
                   OWN_MEMORY_DEVICES) {
  if (world().size() > 1 || (D::kSlow && test::kSanitized)) return;
  constexpr auto kMain = static_cast<size_t>(MemoryCategory::main_parameters),
                 kMoments = static_cast<size_t>(MemoryCategory::moments),
                 kGradients = static_cast<size_t>(MemoryCategory::gradients),
                 kParameters = static_cast<size_t>(MemoryCategory::parameters);
  for (const Variant& variant : variants()) {
    const bool first = &variant == &variants()[0], fp8_moments = &variant == &variants()[5];
    if (!first && (test::kSanitized || (D::kSlow && !fp8_moments))) continue;
    if (std::ranges::count(variant.overrides, "mixed_precision.fp8=hybrid") && !test::multiplies<D>("fp8"))
      continue;
    CAPTURE(std::string(variant.preset));
    CAPTURE(variant.overrides);
    const config::Config config = test::resolve_preset<D>(variant.preset, with(kBuckets, variant.overrides));
    for (const double fraction : {0.3, 1.0}) {
      CAPTURE(fraction);
      const StepEstimate estimate = estimate_step(offloaded(config, fraction));
      const Trained used = run_steps(offloaded(config, fraction), 2);
      INFO("estimated: ", memory_text(estimate.memory), "; host: ", memory_text(estimate.host_memory));
      INFO("used: ", memory_text(used.device), "; host: ", memory_text(used.host));
      CHECK(used.device.peak == doctest::Approx(estimate.memory.peak).epsilon(0.02));
      CHECK(used.device.reserved == doctest::Approx(estimate.memory.reserved).epsilon(0.02));
      for (const size_t category : {kMain, kMoments, kGradients, kParameters})
        CHECK(used.host.peak_by_category[category] == estimate.host_memory.peak_by_category[category]);
      CHECK(used.host.peak_by_category[kMoments] > 0);
      CHECK(used.host.peak_by_category[kMain] > 0);
    }
  }
}

TEST_CASE_TEMPLATE("the device's memory falls by the state that is offloaded", D, OWN_MEMORY_DEVICES) {
  if (world().size() > 1 || (D::kSlow && test::kSanitized)) return;
  for (const char* preset : {"bf16_mixed", "fp32"}) {
    const config::Config config =
        test::resolve_preset<D>(preset, {"model.hidden_size=96", "model.vocab_size=4000"});
    const Trained expected = run_steps(config, 1);
    for (const double fraction : {0.5, 1.0}) {
      const Trained found = run_steps(offloaded(config, fraction), 1);
      // Two moments, and main parameters beside those in bf16.
      const int64_t bytes = (std::string(preset) == "fp32" ? 8 : 12) * found.offloaded;
      CHECK(static_cast<double>(expected.device.peak - found.device.peak) ==
            doctest::Approx(bytes).epsilon(0.02));
    }
  }
}

namespace {
class Collector final : public TapeObserver {
 public:
  bool waits() const override { return false; }
  void observe(const TapeEvent&) override {}
  void queue_span(const QueueSpan& span) override { spans.push_back(span); }
  std::vector<QueueSpan> spans;
};
}  // namespace

TEST_CASE("a trace shows the waits of updates for the file of their state") {
  if (world().size() > 1) return;
  const test::SharedDirectory files;
  Collector collected;
  Running r(in_files(test::resolve_preset<test::Checked>("bf16_mixed", kBuckets), 1, files.path()));
  r.step();
  r.runner.observe(&collected);
  r.step();
  r.runner.observe(nullptr);
  r.runner.device().synchronize();
  const std::string last = std::to_string(r.runner.optimizer().buffers().size() - 1);
  CHECK(std::ranges::count_if(collected.spans, [&](const QueueSpan& span) {
          return span.queue == "host kernels" && span.name == "wait for the file of chunk " + last;
        }) == 1);
}

TEST_CASE("a trace shows the copies of offloaded updates on their queues, beside each other") {
  if (world().size() > 1) return;
  const config::Config config =
      offloaded(test::resolve_preset<test::Checked>("bf16_mixed", {"ddp.bucket_size=5000"}), 1);
  Collector collected;
  Running r(config);
  r.runner.observe(&collected);
  constexpr int kSteps = 3;
  for (int i = 0; i < kSteps; ++i) r.step();
  r.runner.observe(nullptr);
  r.runner.device().synchronize();
  const int64_t buckets = std::ssize(r.runner.optimizer().buffers());
  CHECK(buckets > 3);
  const auto count = [&](const char* queue, const char* what) {
    return std::ranges::count_if(collected.spans, [&](const QueueSpan& span) {
      return span.queue == queue && span.name.starts_with(what);
    });
  };
  CHECK(count("device to host", "step control") == kSteps);
  CHECK(count("device to host", "gradients of bucket ") == kSteps * buckets);
  CHECK(count("host kernels", "update of bucket ") == kSteps * buckets);
  CHECK(count("host to device", "parameters of bucket ") == kSteps * buckets);
  int64_t overlaps = 0;
  for (const QueueSpan& update : collected.spans)
    if (update.queue == "host kernels")
      overlaps += std::ranges::count_if(collected.spans, [&](const QueueSpan& copy) {
        return copy.queue != "host kernels" && std::max(copy.before->time(), update.before->time()) <
                                                   std::min(copy.after->time(), update.after->time());
      });
  CHECK(overlaps > 0);
}

TEST_CASE("the log says where a file of optimizer state saves no memory") {
  if (world().size() > 1) return;
  const test::SharedDirectory files;
  const auto note = [&](const config::Config& config) {
    Running r(config);
    return state_file_note(r.runner.store().state_file(), 1);
  };
  config::Config config =
      in_files(test::resolve_preset<test::Cpu>("fp32", {"model.vocab_size=4000"}), 1, files.path());
  config.optimizer.optimizer_offload_chunk_size = config::OptimizerConfig{}.optimizer_offload_chunk_size;
  const std::string large = note(config), field = "optimizer.optimizer_offload_chunk_size";
  const size_t at =
      large.find("no memory is saved, because its chunks in memory are as large: set " + field + "=");
  REQUIRE_MESSAGE(at != std::string::npos, large);
  config.optimizer.optimizer_offload_chunk_size = std::stoll(large.substr(large.find('=', at) + 1));
  CHECK(note(config).find(field) == std::string::npos);
}

TEST_CASE("on the CPU no optimizer state is offloaded, and the log says so") {
  const config::Config config = test::resolve_preset<test::Cpu>("bf16_mixed", kBuckets);
  const Trained expected = run_steps(config, 2), found = run_steps(offloaded(config, 0.3), 2);
  CHECK(found.numbers == expected.numbers);
  CHECK(found.offloaded == 0);
  CHECK(found.device.peak == expected.device.peak);
  CHECK(offload_note(offloaded(config, 0.3), *test::Cpu::make(1)) ==
        "optimizer.optimizer_cpu_offload: nothing is offloaded, because the memory of the device cpu is the "
        "host's");
  CHECK(offload_note(offloaded(config, 0.3), *test::Checked::make(1)).empty());
  CHECK(offload_note(in_files(config, 0.3, "/tmp"), *test::Cpu::make(1)).empty());
  // A fraction of 0 offloads nothing on any device, nor to files.
  for (const config::Config& none : {offloaded(config, 0), in_files(config, 0, "/tmp")}) {
    CHECK(no_offload_note(none.optimizer) ==
          "optimizer.optimizer_offload_fraction is 0: no optimizer state is offloaded");
    CHECK(offload_note(none, *test::Cpu::make(1)).empty());
  }
  CHECK(no_offload_note(offloaded(config, 0.3).optimizer).empty());
  CHECK(no_offload_note(config.optimizer).empty());
  CHECK(estimate_step(offloaded(config, 0.3)).memory.peak == estimate_step(config).memory.peak);
}
