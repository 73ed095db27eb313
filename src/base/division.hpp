// Rounded division of sizes. Apart from checked.hpp, because the sources of kernels need no more than this:
// the headers of errors and strings are half of what nvcc reads.
#pragma once

#include <cstdint>

namespace capstan {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

}  // namespace capstan
