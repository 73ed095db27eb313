// Optimizer state in host memory: updates on the CPU give the bits of updates by the CPU's kernels on the
// device, the host never waits, and every wait between the queues is needed.
#include "optim/host_updates.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "kernels/table.hpp"
#include "offloadable.hpp"
#include "support/devices.hpp"
#include "support/planted_waits.hpp"
#include "support/step_control.hpp"
#include "tensor/launch.hpp"

using namespace capstan;
using optim::FlatBuffer;

namespace {

constexpr int64_t kSizes[] = {301, 64, 173, 7};

std::vector<float> wave(int64_t n, double phase) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(std::sin(phase + static_cast<double>(i)));
  return values;
}

kernels::UpdateRange range(int64_t begin, int64_t count) {
  kernels::UpdateRange range;
  range.begin = begin, range.count = count;
  return range;
}

// Tensors of one buffer on the device that computes the gradients.
struct OnDevice {
  Tensor gradients, parameters;
};

// Steps on four buffers, all but the third offloaded, whose gradients and parameters are written and read by
// kernels of the compute queue. Returns what the compute queue finds in the parameters after each step.
std::vector<float> trained(Device& device, bool offload, config::OptimizerConfig config, DType model,
                           int steps, int skipped = -1) {
  std::unique_ptr<HostDevice> host;
  if (offload) host = std::make_unique<HostDevice>(device, kernels::cpu_table());
  std::vector<FlatBuffer> buffers;
  std::vector<OnDevice> tensors;
  for (const int64_t n : kSizes) {
    const bool moves = offload && buffers.size() != 2;
    Device& home = moves ? *host : device;
    const Tensor main = Tensor::from_host<float>(home, {n}, wave(n, 1));
    OnDevice& here = tensors.emplace_back();
    here.gradients = Tensor::zeros(device, {n});
    here.parameters = model == DType::f32 && !moves ? main : Tensor::zeros(device, {n}, model);
    FlatBuffer buffer{main, {}, {}, {range(0, n / 2), range(n / 2, n - n / 2)}};
    if (model != DType::f32) buffer.model = moves ? Tensor::zeros(home, {n}, model) : here.parameters;
    if (moves) {
      buffer.host = host.get();
      buffer.device_gradients = here.gradients, buffer.device_parameters = here.parameters;
    } else {
      buffer.gradients = here.gradients;
    }
    buffer.bucket = buffers.size();
    buffers.push_back(std::move(buffer));
  }
  std::vector<Tensor> seen;
  {
    const auto optimizer = optim::build(config, device, buffers, 11);
    for (int step = 0; step < steps; ++step) {
      for (size_t b = 0; b < tensors.size(); ++b) {
        const Tensor& gradients = tensors[b].gradients;
        const auto values = wave(gradients.elements(), 7 * step + static_cast<double>(b));
        gradients.copy_from_host_bytes(std::as_bytes(std::span(values)));
        launch(device, device.table().elementwise->scale, gradients, 0.5f, gradients.elements());
      }
      const Tensor control = test::step_control(device, 0.25f, step == skipped);
      const int64_t waits = device.host_waits();
      optimizer->step({.lr = 0.1, .weight_decay = 0.1}, control);
      CHECK(device.host_waits() == waits);
      for (const OnDevice& tensor : tensors) {
        const Tensor& copy =
            seen.emplace_back(Tensor::empty(device, tensor.parameters.shape(), tensor.parameters.dtype()));
        device.copy(copy.address(), tensor.parameters.address(), copy.bytes());
      }
    }
  }
  std::vector<float> values;
  for (const Tensor& tensor : seen)
    for (const float value : tensor.to_floats()) values.push_back(value);
  device.synchronize();
  return values;
}

}  // namespace

TEST_CASE("updates in host memory have the bits of the CPU's, also after a skipped step") {
  for (const auto& config : test::offloadable_optimizers())
    for (const DType model : {DType::f32, DType::bf16, DType::f16}) {
      CAPTURE(static_cast<int>(config.optimizer));
      CAPTURE(std::string(name_of(model)));
      const auto expected = trained(*test::Cpu::make(1), false, config, model, 4, 2);
      for (const bool patient : {false, true}) {
        const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = patient});
        CHECK(trained(*device, true, config, model, 4, 2) == expected);
      }
    }
}

TEST_CASE("updates in host memory run beside the CUDA kernels") {
  const auto expected = trained(*test::Cpu::make(1), false, test::kAdam, DType::bf16, 3);
  const auto found =
      trained(*test::Simulated::make({.threads = 1, .patient = true}), true, test::kAdam, DType::bf16, 3);
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == doctest::Approx(expected[i]).epsilon(0.01));
}

TEST_CASE("every wait of offloaded updates is needed: the checked device finds each one that is missing") {
  const auto expected = trained(*test::Cpu::make(1), false, test::kAdam, DType::bf16, 2);
  // In each step: one for the device, three for gradients, one for a buffer of gradients that is used again,
  // three for parameters, and one of the compute queue.
  CHECK(test::find_missing_waits(
            [&](Device& device) { return trained(device, true, test::kAdam, DType::bf16, 2); }, expected) ==
        2 * 9);
}

TEST_CASE("memory that a host device returns to the system is not in use by copies any more") {
  const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = true});
  HostDevice host(*device, kernels::cpu_table());
  const Tensor there = Tensor::zeros(*device, {100});
  device->synchronize();
  {
    const Tensor here = Tensor::from_host<float>(host, {100}, wave(100, 1));
    host.start_upload(here, there, "upload");
  }
  {
    const Tensor here = Tensor::empty(host, {100});
    host.follow_device();
    host.start_download(there, here, "download", device->record(Queue::host_to_device).get());
  }
  host.release_cached();
  device->synchronize();
  CHECK(there.to_host<float>() == wave(100, 1));
  CHECK(device->memory(MemoryKind::host).now == 0);
}

TEST_CASE("simulated device: a download does not change what host kernels before it still read") {
  const auto device = test::Simulated::make({.threads = 1, .patient = true});
  HostDevice host(*device, kernels::cpu_table());
  const Tensor first = Tensor::from_host<float>(*device, {100}, wave(100, 1));
  const Tensor second = Tensor::from_host<float>(*device, {100}, wave(100, 2));
  const Tensor here = Tensor::empty(host, {100}), read = Tensor::empty(host, {100});
  host.follow_device();
  host.start_download(first, here, "first");
  host.wait_for_downloads();
  device->record(Queue::device_to_host)->wait();
  host.copy(read.address(), here.address(), here.bytes());
  host.start_download(second, here, "second", host.record(Queue::compute).get());
  CHECK(read.to_host<float>() == wave(100, 1));
  device->synchronize();
  CHECK(here.to_host<float>() == wave(100, 2));
}

TEST_CASE("memory of offloaded tensors is pinned memory, by category, also in estimates") {
  const auto use = [](Device& device) {
    HostDevice host(device, kernels::cpu_table());
    CategoryScope scope(MemoryCategory::moments);
    const Tensor kept = Tensor::zeros(host, {1000}), other = Tensor::zeros(host, {1000});
    // Memory that a tensor leaves serves the next.
    for (int i = 0; i < 3; ++i) Tensor::zeros(host, {77});
    device.synchronize();
    return device.memory(MemoryKind::host);
  };
  const auto checked = test::Checked::make(1);
  const auto meta = make_meta_device(kernels::cpu_table(), 1, {}, false);
  constexpr auto kMoments = static_cast<size_t>(MemoryCategory::moments);
  const MemoryUse found = use(*checked), estimated = use(*meta);
  CHECK(found.now_by_category[kMoments] == 2 * 4096 + 512);
  CHECK(estimated.now_by_category == found.now_by_category);
  CHECK(estimated.reserved == found.reserved);
  CHECK(checked->memory(MemoryKind::host).now == 0);
}
