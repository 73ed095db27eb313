// The device `simulated`, with kernels of this test: the order of what enqueues itself and of what the device
// queues, errors, and host code that uses device memory.
#include "tensor/simulated_device.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "host_waits.hpp"
#include "support/fake_cuda.hpp"
#include "support/processes.hpp"
#include "tensor/launch.hpp"

using namespace capstan;

namespace {

const kernels::Table& empty_table() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
}

// As a CUDA kernel: its call returns before it has run.
void triple_later(kernels::Context& c, float* x, int64_t n) {
  static_cast<HostStream*>(c.stream)->enqueue([=] {
    for (int64_t i = 0; i < n; ++i) x[i] *= 3;
  });
}
void fail_later(kernels::Context& c, int32_t number) {
  static_cast<HostStream*>(c.stream)->enqueue(
      [=] { throw std::runtime_error("kernel " + std::to_string(number) + " failed"); });
}
void refuse_at_once(kernels::Context& c) {
  *c.error = {.file = "test.cu", .function = "refuse_at_once", .reason = "too large"};
}
// As a kernel of the CPU.
void add_two(kernels::Context& c, float* x, int64_t n) {
  c.pool->parallel_for(n, [&](int64_t i, int) { x[i] += 2; });
}

std::unique_ptr<Device> simulated_device(bool patient, uint64_t seed = 1) {
  static const cuda::SimulatedKernels kernels{
      .table = &empty_table(),
      .stream_kernels = {reinterpret_cast<const void*>(&triple_later),
                         reinterpret_cast<const void*>(&fail_later),
                         reinterpret_cast<const void*>(&refuse_at_once)}};
  return std::make_unique<cuda::SimulatedDevice>(
      kernels, cuda::SimulatedOptions{.threads = 2, .seed = seed, .patient = patient});
}
std::vector<float> ones(int64_t n) {
  return std::vector<float>(static_cast<size_t>(n), 1.0f);
}
constexpr std::array kKernelQueues{Queue::compute, Queue::communication, Queue::host_to_device,
                                   Queue::device_to_host};

}  // namespace

TEST_CASE("simulated device: kernels run in the order of their calls, whoever queues them") {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const auto device = simulated_device(seed == 0, seed);
    CHECK(device->type() == DeviceType::simulated);
    CHECK(device->description() == "simulated 0 (CUDA kernels on the host, compute capability 9.0)");
    const int64_t n = 500;
    for (const Queue queue : kKernelQueues) {
      const Tensor x = Tensor::from_host<float>(*device, {n}, ones(n));
      CHECK(x.text() == "fp32[500] on simulated");
      device->wait_for(queue, *device->record(Queue::compute));
      float expected = 1;
      for (int i = 0; i < 6; ++i) {
        launch(*device, queue, &triple_later, x, n);
        launch(*device, queue, &add_two, x, n);
        expected = 3 * expected + 2;
      }
      device->wait_for(Queue::compute, *device->record(queue));
      CHECK(x.to_host<float>() == std::vector<float>(static_cast<size_t>(n), expected));
    }
  }
}

TEST_CASE("simulated device: without a wait no kernel has run, and memory is NaN") {
  const auto device = simulated_device(true);
  const Tensor x = Tensor::empty(*device, {8});
  for (const float v : x.to_host<float>()) CHECK(std::isnan(v));
  launch(*device, &triple_later, x, int64_t{8});
  launch(*device, &add_two, x, int64_t{8});
  CHECK(!device->record(Queue::compute)->done());
  device->synchronize();
  CHECK(device->record(Queue::compute)->done());
}

TEST_CASE("simulated device: host code that uses a tensor's memory crashes") {
  const auto device = simulated_device(false);
  const Tensor x = Tensor::from_host<float>(*device, {8}, ones(8));
  CHECK(test::fate_of([&] { (void)*reinterpret_cast<volatile char*>(x.address()); }) == test::kCrashed);
  CHECK(test::fate_of([&] { *reinterpret_cast<volatile char*>(x.address() + 31) = 1; }) == test::kCrashed);
  CHECK(test::fate_of(
            [&] { (void)*reinterpret_cast<volatile char*>(device->kernel_address(x.address())); }) == 0);
  CHECK(device->host_address(x.address()) == nullptr);
}

TEST_CASE("simulated device: an error of a kernel stops the work after it and is thrown by the wait") {
  for (const bool patient : {false, true})
    for (const Queue queue : kKernelQueues) {
      const auto device = simulated_device(patient);
      const Tensor x = Tensor::from_host<float>(*device, {4}, ones(4));
      device->wait_for(queue, *device->record(Queue::compute));
      launch(*device, queue, &fail_later, int32_t{7});
      launch(*device, queue, &fail_later, int32_t{8});
      device->wait_for(Queue::compute, *device->record(queue));
      launch(*device, &triple_later, x, int64_t{4});
      launch(*device, &add_two, x, int64_t{4});
      CHECK_THROWS_WITH(device->synchronize(), "kernel 7 failed");
      device->synchronize();
      CHECK(x.to_host<float>() == ones(4));
      launch(*device, &triple_later, x, int64_t{4});
      CHECK(x.to_host<float>() == std::vector<float>(4, 3.0f));
    }
}

TEST_CASE("simulated device: a kernel that refuses its shape is an error of the launch") {
  const auto device = simulated_device(true);
  try {
    launch(*device, &refuse_at_once);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::unsupported);
    CHECK(error.message() == "the kernel refuse_at_once (test.cu): too large");
  }
  device->synchronize();
}

TEST_CASE("simulated device: memory is counted as on a GPU, and runs out") {
  const auto device = simulated_device(false);
  const auto gpu = make_meta_device(empty_table(), 0, cuda::CudaDevice::rules(), false);
  for (Device* each : {device.get(), gpu.get()}) {
    std::vector<Tensor> kept;
    for (const int64_t n : {1, 129, 5000, 300000, 1000000, 3000000}) {
      kept.push_back(Tensor::empty(*each, {n}));
      Tensor::empty(*each, {n});
    }
  }
  CHECK(device->memory().peak == gpu->memory().peak);
  CHECK(device->memory().reserved == gpu->memory().reserved);
  device->release_cached();
  CHECK(device->memory().reserved == 0);

  test::FakeCuda& fake = test::reset_fake_cuda();
  {
    const cuda::SimulatedKernels none{.table = &empty_table()};
    cuda::SimulatedDevice small(test::fake_backend(), none, {});
    const Tensor x = Tensor::zeros(small, {40 << 20}, DType::u8);
    CHECK_THROWS_AS(Tensor::zeros(small, {100 << 20}, DType::u8), Error);
    CHECK(x.to_host<uint8_t>() == std::vector<uint8_t>(40 << 20, 0));
  }
  CHECK(fake.mapped == 0);
  CHECK(fake.open_devices == 0);
}

TEST_CASE("simulated device: every way in which the host waits counts, and nothing else") {
  test::check_host_waits(*simulated_device(false));
}
