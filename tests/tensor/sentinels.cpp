// Writes outside of a block are found and named, on both devices that look for them.
#include "tensor/sentinels.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "support/sanitized.hpp"
#include "tensor/launch.hpp"
#include "tensor/simulated_device.hpp"

using namespace capstan;

namespace {

const kernels::Table& without_kernels() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
}

void write_byte(kernels::Context&, uint8_t* x, int64_t place) {
  x[place] = 1;
}
void read_float(kernels::Context&, const float* x, int64_t place, float* result) {
  *result = x[place];
}
void overrun_workspace(kernels::Context& c, int64_t place) {
  c.workspace.data[place] = std::byte{1};
}
void do_nothing(kernels::Context&) {}

struct CheckedWithSentinels {
  static constexpr bool kAfterFullBlocks = false;
  static std::unique_ptr<Device> make() { return make_checked_device(without_kernels(), 1); }
};
struct SimulatedWithSentinels {
  static constexpr bool kAfterFullBlocks = true;
  static std::unique_ptr<Device> make() {
    static const cuda::SimulatedKernels kernels{.table = &without_kernels()};
    return std::make_unique<cuda::SimulatedDevice>(kernels, cuda::SimulatedOptions());
  }
};
#define BOTH_DEVICES CheckedWithSentinels, SimulatedWithSentinels

std::string message_of_wait(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::internal);
    return error.message();
  }
  return "";
}

}  // namespace

// An address sanitizer reports these writes itself, and ends the program.
TEST_CASE_TEMPLATE("a write outside of a tensor is named where the host waits", D, BOTH_DEVICES) {
  if (test::kAddressSanitized) return;
  for (const int64_t bytes : {1000, 512, 1, 1 << 20, (1 << 21) + 3})
    for (const bool freed : {false, true})
      for (const int way : {0, 1}) {
        std::vector<int64_t> places{-1, -100, -Sentinels::kBytes};
        // A kernel that runs past a full block of the checked device crashes.
        if (D::kAfterFullBlocks || bytes % 512 != 0) places.insert(places.end(), {bytes, bytes + 3});
        for (const int64_t place : places) {
          CAPTURE(bytes);
          CAPTURE(freed);
          CAPTURE(way);
          CAPTURE(place);
          const auto device = D::make();
          const CategoryScope scope(MemoryCategory::gradients);
          const Tensor before = Tensor::zeros(*device, {16}, DType::u8);
          launch(*device, &do_nothing);
          {
            Tensor x = Tensor::zeros(*device, {bytes}, DType::u8);
            const Tensor after = Tensor::zeros(*device, {bytes}, DType::u8);
            launch(*device, &do_nothing);
            launch(*device, &write_byte, x, place);
            launch(*device, &do_nothing);
            if (freed) x = Tensor();
            const std::string message = message_of_wait([&] {
              if (way == 0)
                device->synchronize();
              else
                (void)before.template to_host<uint8_t>();
            });
            CHECK(message == "internal error: a kernel wrote at byte " + std::to_string(place) +
                                 " of a block of " + std::to_string(bytes) +
                                 " bytes for gradients: one of the launches 2 to 4 of the queue compute, or "
                                 "work of another queue at that time");
          }
          // Reported once; the device goes on.
          device->synchronize();
          CHECK(before.template to_host<uint8_t>() == std::vector<uint8_t>(16, 0));
        }
      }
}

TEST_CASE_TEMPLATE("the launches in question are those since the host last waited", D, BOTH_DEVICES) {
  if (test::kAddressSanitized) return;
  const auto device = D::make();
  const Tensor x = Tensor::zeros(*device, {100}, DType::u8);
  for (int i = 0; i < 3; ++i) launch(*device, &do_nothing);
  device->synchronize();
  launch(*device, &write_byte, x, int64_t{100});
  CHECK(message_of_wait([&] { device->synchronize(); }).find("one of the launches 4 to 4 ") !=
        std::string::npos);
}

TEST_CASE_TEMPLATE("what lies outside of a tensor is NaN, also after its block was used", D, BOTH_DEVICES) {
  if (test::kAddressSanitized) return;
  const auto device = D::make();
  const Tensor result = Tensor::zeros(*device, {1});
  for (int round = 0; round < 2; ++round) {
    const Tensor x = Tensor::from_host<float>(*device, {100}, std::vector<float>(100, 1.0f));
    for (const int64_t place : {-1, 100, 127}) {
      launch(*device, &read_float, x, place, result);
      CHECK(std::isnan(result.to_host<float>()[0]));
    }
    launch(*device, &read_float, x, int64_t{99}, result);
    CHECK(result.to_host<float>()[0] == 1);
    if (round == 0) Tensor::zeros(*device, {128});
  }
}

TEST_CASE_TEMPLATE("a write after a workspace is named with its queue and launch", D, BOTH_DEVICES) {
  if (test::kAddressSanitized) return;
  for (const Queue queue : {Queue::compute, Queue::communication}) {
    const auto device = D::make();
    launch(*device, queue, {.shared = 2000}, &overrun_workspace, int64_t{1999});
    device->synchronize();
    for (const size_t bytes : {1984, 640}) {
      launch(*device, queue, {.shared = bytes}, &overrun_workspace, static_cast<int64_t>(bytes) + 2);
      CHECK(message_of_wait([&] { device->synchronize(); }) ==
            "internal error: kernel " + std::to_string(device->launches(queue)) + " of the queue " +
                std::string(name_of(queue)) + " wrote at byte " + std::to_string(bytes + 2) +
                " of its workspace of " + std::to_string(bytes) + " bytes");
    }
    device->synchronize();
  }
}

TEST_CASE_TEMPLATE("sentinels are no part of the memory that is counted", D, BOTH_DEVICES) {
  const auto device = D::make();
  const Tensor x = Tensor::empty(*device, {100});
  CHECK(device->memory().now == 512);
  device->synchronize();
}

TEST_CASE("one changed byte is found at every address, wherever the sentinels begin and end") {
  std::vector<std::byte> memory(64);
  for (size_t begin = 8; begin < 12; ++begin)
    for (const size_t bytes : {0, 1, 2, 3, 7, 16, 37}) {
      INFO("from ", begin, ", ", bytes, " bytes");
      std::ranges::fill(memory, std::byte{9});
      std::byte* const from = memory.data() + begin;
      std::byte* const to = from + bytes;
      write_sentinel(from, to);
      unpoison(from, to);
      CHECK(std::ranges::count(memory, std::byte{9}) == static_cast<int64_t>(memory.size() - bytes));
      CHECK(changed_sentinel(from, to) == to);
      for (std::byte* changed = from; changed < to; ++changed) {
        unpoison(from, to);
        const std::byte was = std::exchange(*changed, std::byte{1});
        CHECK(changed_sentinel(from, to) == changed);
        unpoison(from, to);
        *changed = was;
      }
      unpoison(from, to);
    }
}
