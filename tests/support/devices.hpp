// The devices on which a test runs here: one body for all of them.
//
//   TEST_CASE_TEMPLATE("what is true on every device", D, EVERY_DEVICE) {
//     const auto device = D::make(1);
//     …
//   }
#pragma once

#include <functional>
#include <memory>

#include "kernels/table.hpp"
#include "tensor/device.hpp"

namespace capstan::test {

struct Cpu {
  static constexpr DeviceType type = DeviceType::cpu;
  static std::unique_ptr<Device> make(int threads) { return make_cpu_device(kernels::cpu_table(), threads); }
};
struct Checked {
  static constexpr DeviceType type = DeviceType::checked;
  static std::unique_ptr<Device> make(int threads) {
    return make_checked_device(kernels::cpu_table(), threads);
  }
};
#define EVERY_DEVICE ::capstan::test::Cpu, ::capstan::test::Checked

// Several of each, the plain CPU first: for bodies that hold all to the bits of the first.
inline void on_every_device(const std::function<void(Device&)>& body) {
  for (const int threads : {1, 3}) body(*Cpu::make(threads));
  body(*Checked::make(2));
  body(*make_checked_device(kernels::cpu_table(), 1, {.patient = true}));
}

}  // namespace capstan::test
