// The order in which the simulation runs the blocks of a launch and the threads of a block. A GPU promises
// none: a result that depends on it shows a missing barrier.
#pragma once

#include <cstdint>

namespace capstan::kernels::simulated {

struct Order {
  enum class Kind : uint8_t { forward, reverse, random };
  Kind kind = Kind::forward;
  // Of a random order.
  uint64_t seed = 0;
};

// The order of the launches that begin from now on, in the whole process. It is forward at first.
void set_order(Order order);
Order order();

}  // namespace capstan::kernels::simulated
