// The devices on which a test runs here: one body for all of them.
//
//   TEST_CASE_TEMPLATE("what is true on every device", D, EVERY_DEVICE) {
//     const auto device = D::make(1);
//     …
//   }
//
// A device is `kSlow` if a test that takes many steps or cases should take few of them on it.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kernels/simulated/device_kernels.hpp"
#include "kernels/simulated/order.hpp"
#include "kernels/table.hpp"
#include "support/sanitized.hpp"
#include "tensor/device.hpp"
#include "tensor/simulated_device.hpp"

namespace capstan::test {

struct Cpu {
  static constexpr DeviceType type = DeviceType::cpu;
  static constexpr bool kSlow = false;
  static std::unique_ptr<Device> make(int threads) { return make_cpu_device(kernels::cpu_table(), threads); }
};
struct Checked {
  static constexpr DeviceType type = DeviceType::checked;
  static constexpr bool kSlow = false;
  static std::unique_ptr<Device> make(int threads) {
    return make_checked_device(kernels::cpu_table(), threads);
  }
};
// The CUDA kernels on the host. Its sums are in another order than the CPU's.
struct Simulated {
  static constexpr DeviceType type = DeviceType::simulated;
  static constexpr bool kSlow = true;
  static std::unique_ptr<Device> make(int threads) { return make({.threads = threads}); }
  // Each device runs the threads of its kernels in another order.
  static std::unique_ptr<Device> make(const cuda::SimulatedOptions& options) {
    using kernels::simulated::Order;
    constexpr Order orders[] = {
        {Order::Kind::forward, 0}, {Order::Kind::random, 1}, {Order::Kind::reverse, 0}};
    static size_t made = 0;
    kernels::simulated::set_order(orders[made++ % std::size(orders)]);
    return std::make_unique<cuda::SimulatedDevice>(kernels::simulated_device_kernels(), options);
  }
};
#ifdef CAPSTAN_TEST_GPU
// A GPU of this machine (gpu.cpp), in programs of the preset `cuda`. The tests NAME_gpu of CTest, with the
// label `cuda`, run its cases and no others (main.cpp).
std::unique_ptr<Device> make_gpu_device(int threads);
// 90 for 9.0.
int gpu_capability();
// Whether this is the run of such a test.
bool runs_on_gpu();
struct Cuda {
  static constexpr DeviceType type = DeviceType::cuda;
  static constexpr bool kSlow = false;
  static std::unique_ptr<Device> make(int threads) { return make_gpu_device(threads); }
};
#define GPU_DEVICES , ::capstan::test::Cuda
#else
#define GPU_DEVICES
#endif
// Whether D multiplies in the precision whose name this is, or is a part of it. The CPU and the simulation
// do; a GPU refuses what its tensor cores lack.
template <class D>
bool multiplies([[maybe_unused]] std::string_view precision) {
#ifdef CAPSTAN_TEST_GPU
  if (D::type != DeviceType::cuda) return true;
  const auto names = [&](const char* part) { return precision.find(part) != std::string_view::npos; };
  if (names("mxfp8") || names("nvfp4")) return gpu_capability() >= 100;
  return names("blockwise") ? gpu_capability() == 90 : gpu_capability() >= 89;
#else
  return true;
#endif
}
// Every device but the simulation, for tests of many steps or ranks, which take seconds to minutes on it.
#define FAST_DEVICES ::capstan::test::Cpu, ::capstan::test::Checked GPU_DEVICES
// Under sanitizers test_simulated alone runs the CUDA kernels: their switches of stacks are slow there.
#ifdef CAPSTAN_SANITIZED
#define EVERY_DEVICE FAST_DEVICES
#else
#define EVERY_DEVICE FAST_DEVICES, ::capstan::test::Simulated
#endif
// Devices with the CUDA kernels, and those with memory of their own. Under sanitizers too: a case may leave
// out the simulation there.
#define CUDA_KERNEL_DEVICES ::capstan::test::Simulated GPU_DEVICES
#define OWN_MEMORY_DEVICES ::capstan::test::Checked, CUDA_KERNEL_DEVICES

constexpr bool has_cuda_kernels(DeviceType type) {
  return type == DeviceType::simulated || type == DeviceType::cuda;
}
// The device to whose bits D is held: it has the same kernels.
template <class D>
using Reference = std::conditional_t<has_cuda_kernels(D::type), D, Cpu>;
// Relative differences of losses and gradient norms in fp32 between devices whose kernels sum in other
// orders.
inline constexpr double kOtherKernels = 1e-4;
// Whether numbers of a run on D are those of the CPU: the bits, or what other kernels compute.
template <class D>
void check_cpu_numbers(const std::vector<double>& found, const std::vector<double>& of_the_cpu) {
  if (!has_cuda_kernels(D::type)) {
    CHECK(found == of_the_cpu);
    return;
  }
  REQUIRE(found.size() == of_the_cpu.size());
  for (size_t i = 0; i < found.size(); ++i)
    CHECK(found[i] == doctest::Approx(of_the_cpu[i]).epsilon(kOtherKernels));
}

// Several of each, the plain CPU first. Cases with "every device" in their name are those of the GPU too.
inline void on_every_device(const std::function<void(Device&)>& body) {
#ifdef CAPSTAN_TEST_GPU
  if (runs_on_gpu()) return body(*Cuda::make(2));
#endif
  for (const int threads : {1, 3}) body(*Cpu::make(threads));
  body(*Checked::make(2));
  body(*make_checked_device(kernels::cpu_table(), 1, {.patient = true}));
#ifndef CAPSTAN_SANITIZED
  body(*Simulated::make({.threads = 2, .patient = true}));
  body(*Simulated::make({.threads = 1}));
#endif
}

// The results of the first device with the CPU's kernels and of the first with the CUDA kernels, to whose
// bits the others are held.
template <class T>
class FirstResults {
 public:
  // Empty for the first device.
  std::optional<T>& of(const Device& device) {
    return firsts_[device.type() == DeviceType::cuda ? 2 : device.type() == DeviceType::simulated ? 1 : 0];
  }

 private:
  std::optional<T> firsts_[3];
};

}  // namespace capstan::test
