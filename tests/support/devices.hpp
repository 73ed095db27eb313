// Every device on which an operation can be tested here: tests have one body for all of them.
#pragma once

#include <functional>
#include <memory>

#include "kernels/table.hpp"
#include "tensor/device.hpp"

namespace capstan::test {

inline void on_every_device(const std::function<void(Device&)>& body) {
  for (const int threads : {1, 3}) {
    const auto device = make_cpu_device(kernels::cpu_table(), threads);
    body(*device);
  }
}

}  // namespace capstan::test
