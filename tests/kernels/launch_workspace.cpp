// The workspace of a launch: where it lies, what the memory counts say, and how misuse is found.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/cpu/parallel.hpp"
#include "tensor/launch.hpp"

using namespace capstan;

namespace {

const kernels::Table& no_table() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
}
// Device types without a kernel table.
struct Cpu {
  static std::unique_ptr<Device> make(int threads) { return make_cpu_device(no_table(), threads); }
};
struct Checked {
  static std::unique_ptr<Device> make(int threads) { return make_checked_device(no_table(), threads); }
};

constexpr kernels::WorkspaceSize kNeed{100 * sizeof(float), 10 * sizeof(float)};

// y[0] = the first value of the workspace; then fills it, and sums it into y[1]. Needs kNeed.
void fill_and_sum(kernels::Context& c, float* y, float value) {
  const kernels::WorkspaceParts parts(c, kNeed);
  if (!parts) return;
  auto* shared = parts.shared<float>();
  y[0] = shared[0];
  std::fill_n(shared, 100, value);
  for (int worker = 0; worker < c.pool->size(); ++worker) std::fill_n(parts.worker<float>(worker), 10, value);
  y[1] = 0;
  for (int i = 0; i < 100; ++i) y[1] += shared[i];
  for (int worker = 0; worker < c.pool->size(); ++worker)
    for (int i = 0; i < 10; ++i) y[1] += parts.worker<float>(worker)[i];
}
// Writes `at` bytes after the begin of its workspace. AddressSanitizer would end the program at a write after
// the end, before the device finds it.
__attribute__((no_sanitize("address"))) void write_at(kernels::Context& c, int64_t at) {
  c.workspace.data[at] = std::byte{1};
}

std::string message_of(Device& device, const std::function<void()>& act) {
  try {
    act();
    device.synchronize();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::internal);
    return error.message();
  }
  return "no error";
}

}  // namespace

TEST_CASE("a workspace is the launch's shared part and one for each worker, at cache lines") {
  CHECK(kernels::WorkspaceSize{}.total(7) == 0);
  CHECK(kernels::WorkspaceSize{1, 0}.total(7) == 64);
  CHECK(kernels::WorkspaceSize{65, 1}.total(3) == 128 + 3 * 64);
  CHECK(kernels::WorkspaceSize{64, 8}.total(0) == 64);  // an accelerator
}

TEST_CASE_TEMPLATE("the workspace of a launch is memory of the device, and free after it", D, Cpu, Checked) {
  for (const int threads : {1, 3}) {
    const auto device = D::make(threads);
    const Tensor y = Tensor::zeros(*device, {2});
    const int64_t before = device->memory().now;
    for (int i = 0; i < 5; ++i) launch(*device, kNeed, &fill_and_sum, y, 2.0f);
    CHECK(y.to_host<float>()[1] == 2 * (100 + 10 * threads));
    const MemoryUse use = device->memory();
    CHECK(use.now == before);
    const int64_t bytes = device->allocator_rules().round(static_cast<int64_t>(kNeed.total(threads)));
    CHECK(use.peak == before + bytes);
    CHECK(use.peak_by_category[static_cast<size_t>(MemoryCategory::workspace)] == bytes);
    CHECK(use.system_requests <= 2);

    // The estimate counts the same.
    const auto meta = make_meta_device(no_table(), threads);
    const Tensor shape = Tensor::zeros(*meta, {2});
    launch(*meta, kNeed, &fill_and_sum, shape, 2.0f);
    CHECK(meta->memory().peak == use.peak);
    CHECK(meta->memory().reserved == use.reserved);
  }
}

TEST_CASE_TEMPLATE("a kernel that is given too small a workspace is named and writes nothing", D, Cpu,
                   Checked) {
  const auto device = D::make(2);
  for (const Queue queue : {Queue::compute, Queue::communication}) {
    CAPTURE(name_of(queue));
    const Tensor y = Tensor::zeros(*device, {2});
    device->synchronize();
    for (const kernels::WorkspaceSize small :
         {kernels::WorkspaceSize{}, kernels::WorkspaceSize{64, 0}, kernels::WorkspaceSize{kNeed.shared, 0}}) {
      const std::string message =
          message_of(*device, [&] { launch(*device, queue, small, &fill_and_sum, y, 2.0f); });
      CAPTURE(message);
      CHECK(message.find("fill_and_sum") != std::string::npos);
      CHECK(message.find("launch_workspace.cpp") != std::string::npos);
      CHECK(message.find("needs a workspace of 576 bytes and was launched with " +
                         std::to_string(small.total(2))) != std::string::npos);
    }
    CHECK(y.to_host<float>() == std::vector<float>{0, 0});
    // The error does not stay.
    launch(*device, queue, kNeed, &fill_and_sum, y, 0.0f);
    device->synchronize();
  }
}

TEST_CASE("checked device: a kernel that writes after its workspace is found and counted") {
  const auto device = make_checked_device(no_table(), 1);
  const kernels::WorkspaceSize need{200, 0};
  for (const Queue queue : {Queue::compute, Queue::communication}) {
    device->synchronize();
    launch(*device, queue, need, &write_at, int64_t{255});
    device->synchronize();
    for (const int64_t at : {256, 300, 511}) {
      const std::string message = message_of(*device, [&] { launch(*device, queue, need, &write_at, at); });
      CHECK(message == "internal error: kernel " + std::to_string(device->launches(queue)) +
                           " of the queue " + std::string(name_of(queue)) + " wrote at byte " +
                           std::to_string(at) + " of its workspace of 256 bytes");
    }
  }
}

TEST_CASE("checked device: a workspace holds NaNs, also where an earlier launch has written") {
  for (const Queue queue : {Queue::compute, Queue::communication}) {
    const auto device = make_checked_device(no_table(), 2);
    const Tensor y = Tensor::zeros(*device, {2});
    device->synchronize();
    for (int i = 0; i < 3; ++i) {
      launch(*device, queue, kNeed, &fill_and_sum, y, 1.0f);
      device->synchronize();
      CHECK(std::isnan(y.to_host<float>()[0]));
    }
  }
}

TEST_CASE_TEMPLATE("another queue keeps one workspace, which kernels of the compute queue do not share", D,
                   Cpu, Checked) {
  const auto device = D::make(1);
  const Tensor here = Tensor::zeros(*device, {2}), there = Tensor::zeros(*device, {2});
  device->synchronize();
  const int64_t before = device->memory().now;
  for (int i = 0; i < 50; ++i) {
    launch(*device, Queue::communication, kNeed, &fill_and_sum, there, 3.0f);
    launch(*device, kNeed, &fill_and_sum, here, 4.0f);
  }
  device->synchronize();
  CHECK(here.to_host<float>()[1] == 4 * 110);
  CHECK(there.to_host<float>()[1] == 3 * 110);
  CHECK(device->memory().now == before + 512);
  // It grows to the largest need, in the order of both queues.
  launch(*device, Queue::communication, {4000, 0}, &write_at, int64_t{3999});
  launch(*device, kNeed, &fill_and_sum, here, 5.0f);
  launch(*device, Queue::communication, kNeed, &fill_and_sum, there, 6.0f);
  device->synchronize();
  CHECK(here.to_host<float>()[1] == 5 * 110);
  CHECK(there.to_host<float>()[1] == 6 * 110);
  CHECK(device->memory().now == before + 4096);
}

TEST_CASE_TEMPLATE("a workspace that the system refuses is an error, and there is memory again afterward", D,
                   Cpu, Checked) {
  const auto device = D::make(1);
  const Tensor y = Tensor::zeros(*device, {2});
  for (const size_t bytes : {size_t{1} << 60, size_t{1} << 55}) {
    try {
      launch(*device, {bytes, 0}, &fill_and_sum, y, 1.0f);
      FAIL("must be refused");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::no_fit);
      CHECK(error.message().find("for workspace") != std::string::npos);
    }
  }
  launch(*device, kNeed, &fill_and_sum, y, 1.0f);
  CHECK(y.to_host<float>()[1] == 110);
}
