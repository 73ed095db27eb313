// The order in which the simulation runs the blocks of a launch and the threads of a block. A GPU promises
// none: a result that depends on it shows a missing barrier.
#pragma once

#include <cstdint>

namespace capstan::kernels::simulated {

struct Order {
  enum class Kind : uint8_t { forward, reverse, random };
  Kind kind = Kind::forward;
  // Seed of a random order; the other orders ignore it.
  uint64_t seed = 0;
};

// The order for all launches of the process that begin from now on. The initial order is forward.
void set_order(Order order);
Order order();

}  // namespace capstan::kernels::simulated
