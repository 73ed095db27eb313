// Collectives as operations. Those of tensor parallelism are in tensor_parallel.hpp.
#pragma once

#include "comm/communicator.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Forward and backward: the sum over the group, fp32. For values that every rank uses differently (statistics
// over all ranks' rows).
Var all_reduce(Tape& tape, const Var& x, comm::Communicator& group);

}  // namespace capstan::ops
