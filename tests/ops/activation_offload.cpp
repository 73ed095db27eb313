// Saved tensors in host memory: their values, views and memory, the order of queues, and missing waits.
#include "ops/activation_offload.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include "kernels/table.hpp"
#include "support/devices.hpp"
#include "support/planted_waits.hpp"
#include "tensor/launch.hpp"

using namespace capstan;

namespace {

std::vector<float> counting(int64_t n, float first) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), first);
  return values;
}

// Overwrites x with multiples of it on the compute queue.
void scale(const Tensor& x, float factor) {
  launch(x.device(), x.device().table().elementwise->scale, x, factor, x.elements());
}

// Two layers forward and backward, whose operations overwrite their saved tensors in the backward pass, as
// they may. Returns all values that the backward pass finds.
std::vector<float> two_layers(Device& device, int steps) {
  constexpr int64_t kCount = 301;
  ActivationOffload offload(device);
  std::vector<Tensor> found;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::shared_ptr<OffloadedLayer>> layers;
    for (int layer = 0; layer < 2; ++layer) {
      const Tensor x =
          Tensor::from_host<float>(device, {kCount}, counting(kCount, 100.0f * step + 10.0f * layer));
      scale(x, 2);
      layers.push_back(offload.start_offload("layer " + std::to_string(layer), {{x}}));
    }
    const Tensor last = Tensor::zeros(device, {kCount});
    offload.free_copied();
    offload.start_fetch(*layers[1]);
    for (int layer = 1; layer >= 0; --layer) {
      const auto saved = offload.take(*layers[static_cast<size_t>(layer)]);
      layers.pop_back();
      if (layer > 0) offload.start_fetch(*layers.back());
      scale(saved[0][0], 0.5f);
      // The memory of a layer whose backward pass is over serves the next.
      found.push_back(Tensor::empty(device, {kCount}));
      device.copy(found.back().address(), saved[0][0].address(), saved[0][0].bytes());
    }
  }
  std::vector<float> values;
  for (const Tensor& x : found)
    for (const float value : x.to_host<float>()) values.push_back(value);
  device.synchronize();
  return values;
}

}  // namespace

TEST_CASE_TEMPLATE("offloaded tensors come back with their values, views and shared memory", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  ActivationOffload offload(*device);
  const Tensor rows = Tensor::from_host<float>(*device, {5, 7}, counting(35, 1));
  const Tensor ids = [&] {
    CategoryScope scope(MemoryCategory::data);
    return Tensor::from_host<float>(*device, {3}, counting(3, 50));
  }();
  Tensor bytes =
      Tensor::from_host<bf16>(*device, {3}, std::vector<bf16>{bf16(1.0f), bf16(2.0f), bf16(-4.0f)});
  ActivationOffload::SavedTensors saved{{rows, ids}, {}, {Tensor(), rows.slice(1, 2, 3), bytes}};
  bytes = Tensor();
  const int64_t before = device->memory().now;
  const auto layer = offload.start_offload("layer 0", std::move(saved));
  offload.free_copied();
  // The caller still holds the rows and ids.
  if (!device->shares_host_memory())
    CHECK(device->memory().now == before - device->allocator_rules().round(6));
  offload.start_fetch(*layer);
  const auto back = offload.take(*layer);
  REQUIRE(back.size() == 3);
  CHECK(back[1].empty());
  CHECK(back[0][0].to_host<float>() == counting(35, 1));
  CHECK(!back[0][0].shares_storage_with(rows));
  CHECK(back[0][1].shares_storage_with(ids));
  CHECK(!back[2][0].defined());
  CHECK(back[2][1].shares_storage_with(back[0][0]));
  CHECK(back[2][1].stride(0) == 7);
  CHECK(back[2][1].address() - back[0][0].address() == 8);
  CHECK(back[2][2].to_floats() == std::vector<float>{1, 2, -4});
  CHECK(back[2][2].unique());
}

TEST_CASE_TEMPLATE("tensors that are needed at once do not leave the device", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  ActivationOffload offload(*device);
  const Tensor x = Tensor::from_host<float>(*device, {9}, counting(9, 3));
  const auto layer = offload.start_offload("layer 0", {{x}});
  const int64_t fetched = device->copied_bytes(Queue::host_to_device);
  offload.start_fetch(*layer);
  const auto back = offload.take(*layer);
  CHECK(device->copied_bytes(Queue::host_to_device) == fetched);
  CHECK(back[0][0].shares_storage_with(x));
  scale(back[0][0], 2);
  device->synchronize();
}

TEST_CASE_TEMPLATE("host buffers are used again, by the smallest layer that fits", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const auto host = [&] {
    return device->host_memory().now_by_category[size_t(MemoryCategory::activations)];
  };
  ActivationOffload offload(*device);
  const auto pass = [&](int64_t elements) {
    const auto layer = offload.start_offload("layer", {{Tensor::zeros(*device, {elements})}});
    offload.free_copied();
    const auto back = offload.take(*layer);
    CHECK(back[0][0].to_floats() == std::vector<float>(static_cast<size_t>(elements), 0.0f));
  };
  const int64_t none = host();
  pass(1000);
  const int64_t one = host();
  CHECK(one > none);
  for (const int64_t elements : {1000, 300, 7}) pass(elements);
  CHECK(host() == one);
  pass(2000);
  CHECK(host() > one);
}

TEST_CASE(
    "on every device the next step writes a host buffer after the fetch of the step before has read it") {
  const auto expected = two_layers(*test::Cpu::make(1), 3);
  test::on_every_device([&](Device& device) { CHECK(two_layers(device, 3) == expected); });
}

TEST_CASE("the compute queue runs on beside the copies of an offload, and the host never waits") {
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  ActivationOffload offload(*device);
  const auto make = [&](float value) { return Tensor::from_host<float>(*device, {64}, counting(64, value)); };
  const Tensor other = make(1);
  // Holds a queue until the kernel that is launched after the start of the copies has run.
  const auto runs_beside = [&](Queue copies, const std::function<void()>& start) {
    std::shared_ptr<Event> kernel;
    std::atomic<bool> known{false}, beside{false};
    device->enqueue(copies, [&] {
      for (int i = 0; i < 10'000 && !beside; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (known) beside = kernel->done();
      }
    });
    const int64_t waits = device->host_waits();
    start();
    scale(other, 1);
    kernel = device->record(Queue::compute);
    CHECK(device->host_waits() == waits);
    known = true;
    kernel->wait();
    device->synchronize();
    return beside.load();
  };
  std::shared_ptr<OffloadedLayer> layer;
  CHECK(runs_beside(Queue::device_to_host, [&] { layer = offload.start_offload("layer 0", {{make(5)}}); }));
  offload.free_copied();
  CHECK(runs_beside(Queue::host_to_device, [&] { offload.start_fetch(*layer); }));
  CHECK(offload.take(*layer)[0][0].to_host<float>() == counting(64, 5));
}

TEST_CASE("every wait of an offload is needed: the checked device finds each one that is missing") {
  const auto expected = two_layers(*test::Cpu::make(1), 3);
  // Eight in each step.
  CHECK(test::find_missing_waits([](Device& device) { return two_layers(device, 3); }, expected) == 24);
}
