// CONTRIBUTING's "Add a device", tried: devices of one file, with memory of their own and a table of few
// kernels, run an operation, transfer and train a model to the bits of the CPU. The first completes each call
// before it returns, the second queues all work, the third only the copies.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/json.hpp"
#include "comm/channel.hpp"
#include "ops/matmul.hpp"
#include "support/devices.hpp"
#include "support/files.hpp"
#include "support/running.hpp"
#include "support/temporary_directory.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "tensor/checked_queue.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/profile.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;

namespace {

int64_t gemms = 0;

// The families that the model uses, and no other. A kernel of its own in front of each GEMM; the others are
// the CPU's.
kernels::Gemm slab_gemm() {
  kernels::Gemm family = *kernels::cpu_table().gemm;
  family.run = [](kernels::Context& c, kernels::GemmShape shape, kernels::Operand a, kernels::Operand b,
                  kernels::Out out, float alpha, float beta, kernels::In bias) {
    ++gemms;
    kernels::cpu_table().gemm->run(c, shape, a, b, out, alpha, beta, bias);
  };
  return family;
}
const kernels::Table& slab_table() {
  static const kernels::Gemm gemm = slab_gemm();
  static const kernels::Table table = [] {
    kernels::Table families = kernels::cpu_table();
    families.gemm = &gemm;
    families.head_norm = nullptr, families.context_attention = nullptr, families.adapter = nullptr;
    return families;
  }();
  return table;
}

// Memory that the host may not read, in one slab for each pool; kernels see it `kOffset` bytes further on.
// The allocator grows in larger steps than that of the CPU.
class SlabDevice : public Device {
 public:
  SlabDevice() : Device(rules()), threads_(2) {
    table_ = &slab_table();
    host_threads_ = &threads_;
    kernel_offset_ = kOffset;
    for (Slab& slab : slabs_) slab.reset(static_cast<std::byte*>(std::aligned_alloc(kOffset, kSlab)));
  }
  ~SlabDevice() override {
    release_pinned_pool();
    CHECK(pinned_ == 0);
  }
  DeviceType type() const override { return DeviceType::cuda; }
  void synchronize() override {}
  void zero(std::byte* data, int64_t bytes) override {
    std::memset(kernel_address(data), 0, static_cast<size_t>(bytes));
  }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(kernel_address(to), from + kOffset, static_cast<size_t>(bytes));
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    count_copy(Queue::host_to_device, bytes);
    if (bytes > 0) std::memcpy(kernel_address(to), from, static_cast<size_t>(bytes));
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    count_copy(Queue::device_to_host, bytes);
    if (bytes > 0) std::memcpy(to, from + kOffset, static_cast<size_t>(bytes));
  }
  std::byte* host_address(std::byte*) override { return nullptr; }

 protected:
  bool grow(Pool, int64_t end, int64_t bytes) override { return end + bytes <= kSlab - kOffset; }
  void shrink(Pool, int64_t, int64_t) override {}
  std::byte* place(Pool pool, int64_t offset, int64_t) override {
    return slabs_[static_cast<size_t>(pool)].get() + offset;
  }
  std::byte* place_pinned(int64_t size) override {
    ++pinned_;
    return static_cast<std::byte*>(std::aligned_alloc(kOffset, static_cast<size_t>(round_up(size, kOffset))));
  }
  void retire_pinned(std::byte* data) override {
    --pinned_;
    std::free(data);
  }

 private:
  static constexpr int64_t kOffset = 4096, kSlab = int64_t{32} << 20;
  static AllocatorRules rules() {
    AllocatorRules rules;
    rules.small_growth = 1 << 20;
    return rules;
  }
  using Slab = std::unique_ptr<std::byte, decltype(&std::free)>;
  ThreadPool threads_;
  // Blocks of pinned memory.
  int64_t pinned_ = 0;
  std::array<Slab, 2> slabs_{Slab(nullptr, std::free), Slab(nullptr, std::free)};
};

// The same memory; work is queued, and events order the queues.
class QueuedSlabDevice : public SlabDevice {
 public:
  QueuedSlabDevice() {
    launch_mode_ = LaunchMode::queue;
    for (uint64_t seed = 0; seed < kQueues; ++seed)
      queues_.emplace_back(seed, CheckedQueue::DelayedItems::some);
  }
  ~QueuedSlabDevice() override { QueuedSlabDevice::synchronize(); }
  bool queues_work() const override { return true; }
  void synchronize() override {
    ++host_waits_;
    for (CheckedQueue& queue : queues_) queue.wait(queue.last());
  }
  void enqueue(Queue queue, std::function<void()> work) override { push(queue, std::move(work)); }
  Queue add_queue(AddedQueue, std::string) override {
    queues_.emplace_back(queues_.size(), CheckedQueue::DelayedItems::none);
    return static_cast<Queue>(queues_.size() - 1);
  }
  void push(Queue queue, std::function<void()> work) { queue_of(queue).push(std::move(work)); }
  void zero(std::byte* data, int64_t bytes) override {
    push(Queue::compute, [=, this] { SlabDevice::zero(data, bytes); });
  }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    push(Queue::compute, [=, this] { SlabDevice::copy(to, from, bytes); });
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    const auto* begin = static_cast<const std::byte*>(from);
    count_copy(Queue::host_to_device, bytes);
    push(Queue::compute, [to = kernel_address(to), staged = std::vector<std::byte>(begin, begin + bytes)] {
      std::ranges::copy(staged, to);
    });
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    start_copy_to_host(to, from, bytes, Queue::compute);
    record(Queue::compute)->wait();
  }
  // Number of copies to the device.
  int64_t copies_started = 0;
  void start_copy_to_device(std::byte* to, const void* from, int64_t bytes, Queue queue) override {
    ++copies_started;
    count_copy(Queue::host_to_device, bytes);
    push_copy(kernel_address(to), static_cast<const std::byte*>(from), bytes, queue);
  }
  void start_copy_to_host(void* to, const std::byte* from, int64_t bytes, Queue queue) override {
    count_copy(Queue::device_to_host, bytes);
    push_copy(static_cast<std::byte*>(to), kernel_address(const_cast<std::byte*>(from)), bytes, queue);
  }
  std::unique_ptr<Event> record(Queue queue) override {
    return std::make_unique<Ticket>(queue_of(queue), host_waits_);
  }
  std::unique_ptr<Event> record_time(Queue queue) override {
    const auto time = std::make_shared<std::atomic<double>>(0);
    push(queue, [time] { time->store(steady_seconds()); });
    auto event = std::make_unique<Ticket>(queue_of(queue), host_waits_);
    event->when = time;
    return event;
  }
  void wait_for(Queue queue, const Event& event) override {
    const Ticket ticket = dynamic_cast<const Ticket&>(event);
    if (&ticket.queue != &queue_of(queue))
      push(queue, [ticket] { ticket.queue.wait_for_error(ticket.number); });
  }

 private:
  struct Ticket final : Event {
    Ticket(CheckedQueue& of, int64_t& waits) : queue(of), number(of.last()), host_waits(waits) {}
    bool done() const override { return queue.done(number); }
    void wait() override {
      ++host_waits;
      queue.wait(number);
    }
    double time() const override { return when->load(); }
    std::shared_ptr<std::atomic<double>> when;
    CheckedQueue& queue;
    CheckedQueue::Ticket number;
    int64_t& host_waits;
  };
  void push_copy(std::byte* to, const std::byte* from, int64_t bytes, Queue queue) {
    push(queue, [=] { std::copy_n(from, bytes, to); });
  }
  std::deque<CheckedQueue> queues_;

 protected:
  CheckedQueue& queue_of(Queue queue) { return queues_[static_cast<size_t>(queue)]; }
};

// Calls its kernels, as an accelerator's backend does, and Device::enqueue runs work at once; copies are
// queued. A kernel runs when the work before it on its queue is done.
class CallSlabDevice final : public QueuedSlabDevice {
 public:
  CallSlabDevice() { launch_mode_ = LaunchMode::call; }
  void enqueue(Queue, std::function<void()> work) override { work(); }

 protected:
  void* stream_of(Queue queue) override {
    queue_of(queue).wait(queue_of(queue).last());
    return nullptr;
  }
};

// Losses and gradient norms of some steps.
std::vector<double> train_on(std::unique_ptr<Device> device, const config::Config& config) {
  train::StepRunner runner(config, test::world(), std::move(device));
  runner.initialize();
  return test::run_until(runner, config, 4);
}

}  // namespace

TEST_CASE("a second device runs an operation with the CPU's bits") {
  const auto product = [](Device& device) {
    std::vector<float> values(60);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.37f * static_cast<float>(i % 11) - 1;
    const Tensor a = Tensor::from_host<float>(device, {5, 12}, values), c = Tensor::zeros(device, {5, 5});
    ops::matmul(ops::Transpose::no, ops::Transpose::yes, a, a, c);
    return c.to_host<float>();
  };
  SlabDevice slab;
  gemms = 0;
  CHECK(product(slab) == product(*test::Cpu::make(1)));
  CHECK(gemms == 1);
  CHECK(slab.memory().reserved == 1 << 20);
}

TEST_CASE("a second device trains a model with the CPU's bits") {
  const int ranks = test::world().size();
  std::vector<config::Config> configs{testing::tiny_config(false, ranks), testing::tiny_config(true, ranks)};
  if (ranks > 1) {
    configs.back().ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads_params;
    configs.push_back(testing::tiny_config(true, ranks));
    configs.back().dist.pipeline_model_parallel_size = ranks;
    configs.back().dist.data_parallel_size = 1;
  }
  for (config::Config& config : configs) {
    config.train.global_batch_size = 4 * ranks;
    gemms = 0;
    const std::vector<double> expected = train_on(test::Cpu::make(1), config);
    CHECK(train_on(std::make_unique<SlabDevice>(), config) == expected);
    CHECK(train_on(std::make_unique<QueuedSlabDevice>(), config) == expected);
    CHECK(train_on(std::make_unique<CallSlabDevice>(), config) == expected);
    CHECK(gemms > 0);
    // Its ranks transfer on queues of their own, over the stand-in for NCCL.
    config.dist.distributed_backend = config::DistributedBackend::nccl_stand_in;
    if (ranks > 1) CHECK(train_on(std::make_unique<QueuedSlabDevice>(), config) == expected);
  }
}

TEST_CASE("a trace of a second device has the times of its events") {
  config::Config config = testing::tiny_config(true, test::world().size());
  config.train.global_batch_size = 4 * test::world().size();
  train::StepRunner runner(config, test::world(), std::make_unique<QueuedSlabDevice>());
  runner.initialize();
  const auto data = train::open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  train::Trace trace(test::world().rank(), false);
  runner.observe(&trace);
  train::StepTimers timers;
  trace.step(1);
  trace.start_clock();
  timers.start_step();
  runner.train_step(loader, timers);
  trace.finish_step();
  runner.observe(nullptr);
  const test::TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "trace.json";
  trace.write(file);
  // The first lane is the host's.
  size_t events = 0;
  const auto written = json_of(test::slurp(file));
  for (const auto& event : written["traceEvents"]) {
    if (event["ph"] != "X" || event["tid"] == 0) continue;
    CHECK(event["ts"].get<double>() > 0);
    CHECK(event["dur"].get<double>() >= 0);
    ++events;
  }
  CHECK(events > 20);
}

TEST_CASE("a micro-batch is one copy to the device: tokens, labels, masks, positions and documents") {
  if (test::world().size() > 1) return;  // transfers between ranks are copies too
  constexpr int64_t kMicroBatches = 4;
  config::Config config = testing::tiny_config(true);
  config.model.attention_dropout = config.model.hidden_dropout = 0.1;
  config.dataset.reset_attention_mask = config.dataset.reset_position_ids = true;
  config.train.micro_batch_size = 1;
  config.train.global_batch_size = kMicroBatches;
  auto owned = std::make_unique<QueuedSlabDevice>();
  const QueuedSlabDevice& device = *owned;
  train::StepRunner runner(config, test::world(), std::move(owned));
  runner.initialize();
  const auto data = train::open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  train::StepTimers timers;
  for (int step = 0; step < 2; ++step) {
    const int64_t before = device.copies_started;
    runner.train_step(loader, timers);
    CHECK(device.copies_started - before == kMicroBatches);
  }
}

TEST_CASE("received data stay in host memory until the device has copied them") {
  comm::Communicator& group = test::world().communicator();
  if (group.size() == 1) return;
  constexpr int64_t kCount = 1000;
  const auto values_of = [](int rank) { return std::vector<float>(kCount, 1.0f + static_cast<float>(rank)); };
  CallSlabDevice device;
  for (int round = 0; round < 4; ++round) {
    const Tensor arriving = Tensor::zeros(device, {kCount}),
                 leaving = Tensor::from_host<float>(device, {kCount}, values_of(group.rank()));
    // The copies to the device wait.
    std::atomic<bool> released{false};
    device.push(Queue::communication, [&released] {
      while (!released.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    group.channel()
        .start(comm::TransferBatch("")
                   .receive(arriving, comm::previous_in(group))
                   .send(leaving, comm::next_in(group)))
        .wait();
    // Memory that was freed is used again.
    std::vector<std::vector<float>> others;
    for (int i = 0; i < 20; ++i) others.emplace_back(kCount, -1.0f);
    released.store(true);
    CHECK(arriving.to_host<float>() == values_of(comm::previous_in(group)));
  }
  CHECK(device.host_memory().now == 2 * 4096);
}
