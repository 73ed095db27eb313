// CudaDevice on a backend without CUDA (support/fake_cuda.hpp).
#include "tensor/cuda_device.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "host_waits.hpp"
#include "support/fake_cuda.hpp"
#include "tensor/host_view.hpp"
#include "tensor/launch.hpp"

using namespace capstan;

namespace {

const kernels::Table& table_without_kernels() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
}
std::unique_ptr<Device> cuda_device() {
  return cuda::make_cuda_device(test::fake_backend(), table_without_kernels(), 0, 1);
}

// Kernels that enqueue themselves, as those of an accelerator.
void add_one_on_stream(kernels::Context& c, const float* x, float* y, int64_t n) {
  test::fake_launch(c.stream, [=] {
    for (int64_t i = 0; i < n; ++i) test::fake_kernel_address(y)[i] = test::fake_kernel_address(x)[i] + 1;
  });
}
void scale_on_stream(kernels::Context& c, float* x, float factor, int64_t n) {
  test::fake_launch(c.stream, [=] {
    for (int64_t i = 0; i < n; ++i) test::fake_kernel_address(x)[i] *= factor;
  });
}
// Copies x to the workspace and back, twice as large.
void double_through_workspace(kernels::Context& c, float* x, int64_t n) {
  test::fake_launch(c.stream, [=, data = reinterpret_cast<float*>(c.workspace.data)] {
    float* const copy = test::fake_kernel_address(data);
    for (int64_t i = 0; i < n; ++i) copy[i] = 2 * test::fake_kernel_address(x)[i];
    for (int64_t i = 0; i < n; ++i) test::fake_kernel_address(x)[i] = copy[i];
  });
}
// Reports an error when it runs, which is after the launch has returned.
std::atomic<bool> report_launched = false;
void report_small_workspace(kernels::Context& c, int64_t needed) {
  test::fake_launch(c.stream, [=, error = c.error] {
    report_launched.wait(false);
    *error = {.file = "test.cu", .function = "report", .needed = static_cast<size_t>(needed), .given = 1};
  });
}

std::vector<float> counted_up(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

constexpr std::array kFourQueues{Queue::compute, Queue::communication, Queue::host_to_device,
                                 Queue::device_to_host};

}  // namespace

TEST_CASE("cuda device: kernels and copies reach the memory in the order of their calls") {
  for (const bool patient : {false, true}) {
    test::reset_fake_cuda().patient = patient;
    const auto device = cuda_device();
    CHECK(device->description() == "cuda 0 (fake GPU, compute capability 9.0)");
    CHECK(device->queues_work());
    CHECK(!device->shares_host_memory());
    const int64_t n = 1000;
    const Tensor x = Tensor::from_host<float>(*device, {n}, counted_up(n));
    CHECK(device->host_address(x.address()) == nullptr);
    std::vector<float> expected = counted_up(n);
    for (int i = 0; i < 10; ++i) {
      launch(*device, &add_one_on_stream, x, x, n);
      launch(*device, &scale_on_stream, x, 0.5f, n);
      for (float& v : expected) v = (v + 1) * 0.5f;
    }
    CHECK(device->launches() == 20);
    CHECK(x.to_host<float>() == expected);
    CHECK(Tensor::zeros(*device, {3}).to_host<float>() == std::vector<float>(3, 0.0f));
    device->copy(x.address(), x.address() + 40, 20);
    const auto moved = x.to_host<float>();
    CHECK(std::equal(moved.begin(), moved.begin() + 5, expected.begin() + 10));
    CHECK(device->copied_bytes(Queue::host_to_device) == 4 * n);
    CHECK(device->copied_bytes(Queue::device_to_host) == 2 * 4 * n + 12);
  }
}

TEST_CASE("cuda device: the source of a copy to the device may change once the call returns") {
  test::reset_fake_cuda().patient = true;
  const auto device = cuda_device();
  std::vector<float> values = counted_up(50);
  const Tensor x = Tensor::from_host<float>(*device, {50}, values);
  values.assign(50, -1.0f);
  CHECK(x.to_host<float>() == counted_up(50));
  CHECK(device->host_waits() == 1);
  // More than the staging buffers hold: the host waits for them, and they are used again.
  const int64_t n = 3 << 20, per_tensor = 4 * n / cuda::StagingBuffers::kBytes;
  std::vector<Tensor> many;
  for (int i = 0; i < 5; ++i) many.push_back(Tensor::from_host<float>(*device, {n}, counted_up(n)));
  CHECK(device->host_waits() > 1);
  CHECK(device->host_waits() <= 5 * per_tensor + 1);
  CHECK(test::fake_cuda().pinned == 1 + static_cast<int64_t>(cuda::StagingBuffers::kBuffers));
  for (const Tensor& t : many) CHECK(t.to_host<float>() == counted_up(n));
}

TEST_CASE("cuda device: copies of every queue happen before their event, and not before a wait") {
  test::reset_fake_cuda().patient = true;
  const auto device = cuda_device();
  const int64_t n = 32;
  for (const Queue queue : kFourQueues) {
    CAPTURE(name_of(queue));
    const Tensor x = Tensor::zeros(*device, {n});
    device->synchronize();
    const std::vector<float> source = counted_up(n);
    std::vector<float> seen(static_cast<size_t>(n), -7.0f);
    device->start_copy_to_device(x.address(), source.data(), x.bytes(), queue);
    device->start_copy_to_host(seen.data(), x.address(), x.bytes(), queue);
    const auto event = device->record(queue);
    // Work of the communication queue, for which other ranks wait, runs at once.
    if (queue != Queue::communication) {
      CHECK(!event->done());
      CHECK(std::isnan(seen[3]));
    }
    const int64_t waits = device->host_waits();
    event->wait();
    CHECK(device->host_waits() == waits + 1);
    CHECK(event->done());
    CHECK(seen == source);
  }
}

TEST_CASE("cuda device: an event orders two queues, in both directions and through an added queue") {
  for (const bool patient : {false, true}) {
    test::reset_fake_cuda().patient = patient;
    const auto device = cuda_device();
    const int64_t n = 64;
    const Queue added = device->add_queue(AddedQueue::transfers, "transfers of `shard`");
    CHECK(device->queue_name(added) == "transfers of `shard`");
    CHECK(device->queue_name(Queue::host_to_device) == "host to device");
    for (const Queue other : kFourQueues) {
      const Tensor x = Tensor::from_host<float>(*device, {n}, counted_up(n));
      device->wait_for(other, *device->record(Queue::compute));
      launch(*device, other, &scale_on_stream, x, 3.0f, n);
      std::vector<float> seen(static_cast<size_t>(n));
      device->wait_for(added, *device->record(other));
      device->start_copy_to_host(seen.data(), x.address(), x.bytes(), added);
      device->wait_for(Queue::compute, *device->record(added));
      launch(*device, &scale_on_stream, x, 0.0f, n);
      device->record(Queue::compute)->wait();
      std::vector<float> expected = counted_up(n);
      for (float& v : expected) v *= 3;
      CHECK(seen == expected);
    }
  }
}

TEST_CASE("cuda device: every queue has a workspace while its kernel runs") {
  test::reset_fake_cuda().patient = true;
  const auto device = cuda_device();
  const kernels::WorkspaceSize small{.shared = 4 * 64, .each_worker = 1000}, large{.shared = 4 * 4096};
  std::vector<Tensor> tensors;
  for (const Queue queue : kFourQueues) {
    tensors.push_back(Tensor::from_host<float>(*device, {4096}, counted_up(4096)));
    device->wait_for(queue, *device->record(Queue::compute));
    launch(*device, queue, small, &double_through_workspace, tensors.back(), int64_t{64});
    launch(*device, queue, large, &double_through_workspace, tensors.back(), int64_t{4096});
  }
  device->synchronize();
  for (const Tensor& tensor : tensors) {
    const auto values = tensor.to_host<float>();
    CHECK(values[63] == 4 * 63);
    CHECK(values[4095] == 2 * 4095);
  }
  // Nothing for workers: no thread of the host runs a kernel.
  CHECK(device->memory().peak_by_category[static_cast<size_t>(MemoryCategory::workspace)] <=
        4 * 4 * 4096 + 4 * 512);
}

TEST_CASE("cuda device: the allocator takes memory in units of 2 MiB and returns it") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  const auto device = cuda_device();
  const auto meta = make_meta_device(table_without_kernels(), 0, cuda::CudaDevice::rules(), false);
  for (Device* each : {device.get(), meta.get()}) {
    CategoryScope scope(MemoryCategory::moments);
    std::vector<Tensor> kept;
    for (const int64_t n : {1, 129, 5000, 300000, 1000000, 20000000}) {
      kept.push_back(Tensor::empty(*each, {n}));
      Tensor::empty(*each, {n});
    }
    Tensor::empty(*each, {129});
  }
  CHECK(device->memory().peak == meta->memory().peak);
  CHECK(device->memory().reserved == meta->memory().reserved);
  CHECK(device->memory().now == 0);
  CHECK(device->memory().reserved % cuda::kMappingUnit == 0);
  CHECK(fake.mapped == device->memory().reserved);
  device->release_cached();
  CHECK(device->memory().reserved == 0);
  CHECK(fake.mapped == 0);
  CHECK(fake.maps == fake.unmaps);
}

TEST_CASE("cuda device: a mapping that is partly in use stays, and is used again") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  const auto device = cuda_device();
  const auto take = [&](int64_t mib) { return Tensor::empty(*device, {mib << 20}, DType::u8); };
  auto first = std::make_unique<Tensor>(take(3)), second = std::make_unique<Tensor>(take(41));
  CHECK(fake.mapped == int64_t{44} << 20);
  second.reset();
  device->release_cached();
  // The first growth took 4 MiB, the next 32 and 8.
  CHECK(device->memory().reserved == int64_t{4} << 20);
  CHECK(fake.mapped == int64_t{4} << 20);
  const Tensor middle = take(37);
  CHECK(fake.mapped == int64_t{40} << 20);
  const std::vector<float> values = counted_up(1000);
  device->copy_to_device(middle.address() + (int64_t{37} << 20) - 4000, values.data(), 4000);
  std::vector<float> seen(1000);
  device->copy_to_host(seen.data(), middle.address() + (int64_t{37} << 20) - 4000, 4000);
  CHECK(seen == values);
  first.reset();
  device->release_cached();
  CHECK(fake.mapped == device->memory().reserved);
}

TEST_CASE("cuda device: memory that runs out is an error which leaves the device usable") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  fake.memory = int64_t{64} << 20;
  const auto device = cuda_device();
  const auto take = [&](int64_t mib) { return Tensor::empty(*device, {mib << 20}, DType::u8); };
  take(50);
  // The free block is returned and its memory taken again.
  const Tensor larger = take(60);
  CHECK(fake.mapped == int64_t{60} << 20);
  const std::string message = message_of([&] { take(6); });
  CHECK(message.find("out of memory on cuda: ") == 0);
  CHECK(fake.mapped == int64_t{60} << 20);
  CHECK_THROWS_AS(take(1000), Error);
  take(4);
}

TEST_CASE("cuda device: the error of a kernel is thrown where the host waits for its queue") {
  for (const int way : {0, 1, 2, 3}) {
    CAPTURE(way);
    test::reset_fake_cuda().patient = true;
    const auto device = cuda_device();
    const Tensor x = Tensor::zeros(*device, {4});
    const Queue queue = way == 3 ? Queue::communication : Queue::compute;
    if (way == 3) device->synchronize();
    report_launched = false;
    launch(*device, queue, &report_small_workspace, int64_t{77});
    report_launched = true;
    report_launched.notify_all();
    // A queue that does not follow.
    device->record(Queue::host_to_device)->wait();
    const std::string message = message_of([&] {
      if (way == 0) device->synchronize();
      if (way == 1) (void)x.to_host<float>();
      if (way >= 2) {
        device->wait_for(Queue::device_to_host, *device->record(queue));
        device->record(Queue::device_to_host)->wait();
      }
    });
    CHECK(
        message ==
        "internal error: the kernel report (test.cu) needs a workspace of 77 bytes and was launched with 1");
    device->synchronize();
    CHECK(x.to_host<float>() == std::vector<float>(4, 0.0f));
  }
}

TEST_CASE("cuda device: work of the host runs in the order of its queue, and its error reaches the waits") {
  test::reset_fake_cuda().patient = true;
  const auto device = cuda_device();
  const Tensor x = Tensor::from_host<float>(*device, {4}, counted_up(4));
  std::vector<float> seen(4), copied(4);
  device->start_copy_to_host(seen.data(), x.address(), x.bytes(), Queue::compute);
  device->enqueue(Queue::compute, [&] { copied = seen; });
  device->record(Queue::compute)->wait();
  CHECK(copied == counted_up(4));
  const Queue added = device->add_queue(AddedQueue::work, "added");
  device->enqueue(added, [] { throw std::runtime_error("first"); });
  device->enqueue(added, [] { throw std::runtime_error("second"); });
  device->wait_for(Queue::communication, *device->record(added));
  CHECK_THROWS_WITH(device->record(Queue::communication)->wait(), "first");
  device->synchronize();
}

TEST_CASE("cuda device: a launch that fails is an error of the next wait") {
  test::reset_fake_cuda();
  const auto device = cuda_device();
  test::fake_cuda().launch_error = "invalid configuration argument";
  CHECK(message_of([&] { device->synchronize(); }) ==
        "cuda 0 (fake GPU, compute capability 9.0): cannot launch a kernel: fake_last_error: invalid "
        "configuration argument");
  device->synchronize();
}

TEST_CASE("cuda device: events with times, on the host's clock") {
  test::reset_fake_cuda();
  const auto device = cuda_device();
  std::vector<QueueSpan> spans;
  device->listen([&](const QueueSpan& span) { spans.push_back(span); });
  const auto sleep = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  const auto clock = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const double start = clock();
  const auto before = device->record_time(Queue::compute);
  device->enqueue(Queue::compute, sleep);
  const auto after = device->record_time(Queue::compute);
  device->wait_for(Queue::communication, *after);
  QueueScope scope(*device, Queue::communication);
  device->enqueue(Queue::communication, sleep);
  scope.end("send");
  device->synchronize();
  const double end = clock();
  CHECK(after->time() - before->time() >= 0.0049);
  CHECK(before->time() >= start - 1e-3);
  REQUIRE(spans.size() == 1);
  CHECK(spans[0].before->time() >= after->time());
  CHECK(spans[0].after->time() - spans[0].before->time() >= 0.0049);
  CHECK(spans[0].after->time() <= end + 1e-3);
  CHECK_THROWS_AS((void)device->record(Queue::compute)->time(), Error);
}

TEST_CASE("cuda device: pinned memory is counted as memory of the host, views and chunks go through it") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  const auto device = cuda_device();
  const int64_t pinned = fake.pinned;
  {
    CategoryScope scope(MemoryCategory::snapshot);
    const PinnedBuffer small(*device, 100), large(*device, (int64_t{1} << 21) + 1);
    CHECK(device->host_memory().now == 512 + (int64_t{1} << 21) + 4096);
    CHECK(device->memory().now == 0);
    CHECK(fake.pinned == pinned + 2);
  }
  CHECK(device->host_memory().now == 0);
  CHECK(fake.pinned == pinned);
  fake.failing = "allocate_pinned", fake.code = cuda::StatusCode::out_of_memory;
  CHECK(message_of([&] { PinnedBuffer(*device, 100); }).find("out of memory on cuda: ") == 0);
  fake.failing.clear();

  const Tensor x = Tensor::from_host<float>(*device, {1000}, counted_up(1000));
  launch(*device, &add_one_on_stream, x, x, int64_t{1000});
  HostView view(x);
  CHECK(view.as<float>()[999] == 1000);
  view.as<float>()[0] = 9;
  view.store();
  std::vector<float> found;
  ChunkReader(*device, 1024).read(x, [&](std::span<const std::byte> bytes) {
    const auto* first = reinterpret_cast<const float*>(bytes.data());
    found.insert(found.end(), first, first + bytes.size() / sizeof(float));
  });
  REQUIRE(found.size() == 1000);
  CHECK(found[0] == 9);
  CHECK(found[999] == 1000);
}

TEST_CASE("cuda device: every error of the backend is an error with the device, the action and the reason") {
  const auto bytes = std::vector<float>(8, 1.0f);
  struct Case {
    const char *function, *action;
    std::function<void(Device&, const Tensor&)> act;
  };
  const std::vector<Case> cases{
      {"wait_stream", "wait for a queue", [](Device& d, const Tensor&) { d.synchronize(); }},
      {"last_error", "launch a kernel", [](Device& d, const Tensor&) { d.synchronize(); }},
      {"create_stream", "create a stream",
       [](Device& d, const Tensor&) { d.add_queue(AddedQueue::transfers, "added"); }},
      {"call_host", "queue work of the host",
       [](Device& d, const Tensor&) { d.enqueue(Queue::compute, [] {}); }},
      {"create_event", "create an event", [](Device& d, const Tensor&) { d.record(Queue::compute); }},
      {"record_event", "record an event", [](Device& d, const Tensor&) { d.record(Queue::compute); }},
      {"record_event", "record an event", [](Device& d, const Tensor&) { d.record_time(Queue::compute); }},
      {"wait_event", "wait for an event", [](Device& d, const Tensor&) { d.record(Queue::compute)->wait(); }},
      {"stream_wait_event", "make a queue wait for an event",
       [](Device& d, const Tensor&) { d.wait_for(Queue::communication, *d.record(Queue::compute)); }},
      {"elapsed", "read the time of an event",
       [](Device& d, const Tensor&) { (void)d.record_time(Queue::compute)->time(); }},
      {"map_memory", "map memory", [](Device& d, const Tensor&) { Tensor::empty(d, {1 << 22}); }},
      {"unmap_memory", "return memory to the system",
       [](Device& d, const Tensor&) {
         Tensor::empty(d, {1 << 22});
         d.release_cached();
       }},
      {"allocate_pinned", "allocate pinned memory", [](Device& d, const Tensor&) { PinnedBuffer(d, 10); }},
      {"allocate_pinned", "allocate pinned memory for copies from the host",
       [&](Device& d, const Tensor& t) { d.copy_to_device(t.address(), bytes.data(), 8); }},
      {"copy", "copy to the device",
       [&](Device& d, const Tensor& t) { d.copy_to_device(t.address(), bytes.data(), 8); }},
      {"copy", "copy to the device",
       [&](Device& d, const Tensor& t) {
         d.start_copy_to_device(t.address(), bytes.data(), 8, Queue::host_to_device);
       }},
      {"copy", "copy to the host", [](Device&, const Tensor& t) { (void)t.to_host<float>(); }},
      {"copy", "copy on the device",
       [](Device& d, const Tensor& t) { d.copy(t.address(), t.address() + 8, 8); }},
      {"zero", "fill memory", [](Device& d, const Tensor& t) { d.zero(t.address(), 8); }},
      {"begin_graph", "begin a CUDA graph (model.cuda_graph_impl)",
       [](Device& d, const Tensor& t) {
         d.use_graphs(true);
         const GraphScope graph(d, "test");
         d.zero(t.address(), 8);
       }},
      {"launch_graph", "run a CUDA graph (model.cuda_graph_impl)",
       [](Device& d, const Tensor& t) {
         d.use_graphs(true);
         const GraphScope graph(d, "test");
         d.zero(t.address(), 8);
         d.synchronize();
       }},
  };
  for (const Case& each : cases) {
    CAPTURE(each.function);
    CAPTURE(each.action);
    test::FakeCuda& fake = test::reset_fake_cuda();
    {
      const auto device = cuda_device();
      const Tensor t = Tensor::zeros(*device, {8});
      fake.failing = each.function;
      const std::string message = message_of([&] { each.act(*device, t); });
      fake.failing.clear();
      CHECK(message == "cuda 0 (fake GPU, compute capability 9.0): cannot " + std::string(each.action) +
                           ": fake_" + each.function + ": planted error");
      device->synchronize();
      CHECK(t.to_host<float>() == std::vector<float>(8, 0.0f));
    }
    CHECK(fake.open_devices == 0);
  }
  // The release of a pinned buffer is part of destructors and cannot fail; the device's error follows.
  test::reset_fake_cuda();
  const auto device = cuda_device();
  std::byte* const pinned = device->allocate_pinned(10, MemoryCategory::data);
  test::fake_cuda().failing = "free_pinned";
  device->free_pinned(pinned, 10, MemoryCategory::data);
  test::fake_cuda().failing = "query_event";
  CHECK(device->record(Queue::compute)->done());
  test::fake_cuda().failing.clear();
  device->free_pinned(pinned, 10, MemoryCategory::data);
}

TEST_CASE("cuda device: the work of a scope is one graph, which waits and transfers divide") {
  const int64_t n = 100;
  for (const bool patient : {false, true}) {
    test::reset_fake_cuda().patient = patient;
    const auto device = cuda_device();
    const Tensor x = Tensor::from_host<float>(*device, {n}, counted_up(n)), y = Tensor::zeros(*device, {n});
    // Kernel, fill, copy and kernel: y = 2 (x + 1), and the first two values are 0.
    const auto layer = [&] {
      const GraphScope graph(*device, "layer");
      launch(*device, &add_one_on_stream, x, x, n);
      device->zero(x.address(), 8);
      device->copy(y.address(), x.address(), 4 * n);
      launch(*device, {.shared = 4096}, &double_through_workspace, y, n);
    };
    struct Counts {
      int64_t graphs, nodes, instantiated;
      bool operator==(const Counts&) const = default;
    };
    const auto counts = [&] {
      const Device::GraphCounts c = device->graph_counts();
      return Counts{c.graphs, c.nodes, c.instantiated};
    };
    layer();
    CHECK(counts() == Counts{0, 0, 0});
    device->use_graphs(true);
    for (int i = 0; i < 3; ++i) layer();
    CHECK(counts() == Counts{3, 12, 1});
    CHECK(device->launches() == 8);
    const std::vector<float> values = y.to_host<float>();
    CHECK(values[1] == 0);
    CHECK(values[2] == 2 * (2 + 4));
    CHECK(values[99] == 2 * (99 + 4));
    CHECK(counts() == Counts{3, 12, 1});

    // An event ends the graph before it; what follows is another one. The name tells graphs apart.
    {
      const GraphScope graph(*device, "halves");
      launch(*device, &add_one_on_stream, x, x, n);
      const auto event = device->record(Queue::compute);
      CHECK(counts() == Counts{4, 13, 2});
      event->wait();
      {
        const GraphScope inner(*device, "inner");
        launch(*device, &add_one_on_stream, x, x, n);
      }
      device->wait_for(Queue::communication, *event);
      CHECK(counts() == Counts{4, 13, 2});
      // Work of another queue is part of no graph, and need not wait for one.
      const Tensor z = Tensor::zeros(*device, {n});
      launch(*device, Queue::communication, &add_one_on_stream, y, y, n);
      const auto other = device->record(Queue::communication);
      other->wait();
      CHECK(counts() == Counts{4, 13, 2});
      device->wait_for(Queue::compute, *other);
      CHECK(counts() == Counts{5, 15, 3});
      const float one = 1;
      launch(*device, &scale_on_stream, x, 2.0f, n);
      device->copy_to_device(x.address(), &one, 4);
      CHECK(counts() == Counts{6, 16, 3});
      launch(*device, &scale_on_stream, x, 2.0f, n);
      CHECK(x.to_host<float>()[0] == 2);
      CHECK(counts() == Counts{7, 17, 3});
    }
    CHECK(x.to_host<float>()[99] == 4 * (99 + 6));
    // Nothing was queued since, so that there was no graph.
    CHECK(counts() == Counts{7, 17, 3});
  }
}

TEST_CASE("cuda device: a scope that an exception leaves submits its work, and an error reaches the waits") {
  test::reset_fake_cuda();
  const auto device = cuda_device();
  device->use_graphs(true);
  const Tensor x = Tensor::from_host<float>(*device, {8}, counted_up(8));
  try {
    const GraphScope graph(*device, "layer");
    launch(*device, &scale_on_stream, x, 2.0f, int64_t{8});
    throw std::runtime_error("planted");
  } catch (const std::runtime_error&) {
  }
  CHECK(x.to_host<float>()[7] == 14);
  test::fake_cuda().failing = "launch_graph";
  {
    const GraphScope graph(*device, "layer");
    launch(*device, &scale_on_stream, x, 2.0f, int64_t{8});
  }
  test::fake_cuda().failing.clear();
  CHECK_THROWS_WITH_AS(device->synchronize(),
                       "cuda 0 (fake GPU, compute capability 9.0): cannot run a CUDA graph "
                       "(model.cuda_graph_impl): fake_launch_graph: planted error",
                       Error);
}

TEST_CASE("cuda device: all that a device has taken is released, also when it cannot be opened") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  const auto nothing_is_left = [&] {
    CHECK(fake.open_devices == 0);
    CHECK(fake.streams == 0);
    CHECK(fake.events == 0);
    CHECK(fake.ranges == 0);
    CHECK(fake.mapped == 0);
    CHECK(fake.pinned == 0);
  };
  {
    const auto device = cuda_device();
    CHECK(fake.streams == 5);
    const Tensor x = Tensor::from_host<float>(*device, {1 << 20}, counted_up(1 << 20));
    device->add_queue(AddedQueue::work, "added");
    device->wait_for(Queue::communication, *device->record_time(Queue::compute));
    launch(*device, Queue::communication, {.shared = 4096}, &double_through_workspace, x, int64_t{1024});
  }
  nothing_is_left();
  for (const char* function :
       {"describe_device", "open_device", "create_stream", "reserve_range", "allocate_pinned"}) {
    CAPTURE(function);
    fake.failing = function;
    CHECK(message_of([] { cuda_device(); }).find(": fake_" + std::string(function) + ": planted error") !=
          std::string::npos);
    nothing_is_left();
  }
  fake.failing.clear();
  CHECK(message_of([] { cuda::make_cuda_device(test::fake_backend(), table_without_kernels(), 1); }) ==
        "cuda 1: cannot read the properties of the device: fake_describe_device: no such device");
}

TEST_CASE("cuda device: every way in which the host waits counts, and nothing else") {
  test::reset_fake_cuda();
  test::check_host_waits(*cuda_device());
}
