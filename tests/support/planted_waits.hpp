// Missing waits between queues, planted one at a time on the checked device.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/table.hpp"
#include "support/errors.hpp"
#include "tensor/device.hpp"

namespace capstan::test {

// Runs `work` on a new device for each wait that it makes, without that wait, and checks that the device
// names each one as missing; then without a planted bug, where its values must be `expected`. Returns the
// number of waits.
inline int64_t find_missing_waits(const std::function<std::vector<float>(Device&)>& work,
                                  const std::vector<float>& expected) {
  for (int64_t ignored = 0;; ++ignored) {
    CAPTURE(ignored);
    const auto device =
        make_checked_device(kernels::cpu_table(), 1, {.patient = true, .ignored_wait = ignored});
    std::vector<float> values;
    const std::string error = error_of([&] { values = work(*device); });
    // There is no such wait.
    if (error.empty()) {
      CHECK(values == expected);
      return ignored;
    }
    CHECK(error.find("missing wait: ") != std::string::npos);
  }
}

}  // namespace capstan::test
