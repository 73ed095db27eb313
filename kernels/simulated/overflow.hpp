// Signed integers that overflow. A GPU wraps them silently, mostly in an index; here the launch that follows,
// or the block that computes it, is an Error with file and line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/simulated/location.hpp"

namespace capstan::kernels::simulated {

// The first overflow of this thread since the last call; empty: none.
std::string take_overflow();
// Throws it, if there is one.
void throw_overflow();
// Throws: the value does not fit into an integer of so many bytes.
[[noreturn]] void report_narrowing(int64_t value, size_t bytes, Location at);

}  // namespace capstan::kernels::simulated
