// Collectives as operations. Those of tensor parallelism are in tensor_parallel.hpp.
#pragma once

#include "comm/communicator.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Forward and backward: the sum over the group, fp32. For values that every rank uses differently (statistics
// over all ranks' rows). purpose: what is summed (comm::TransferBatch).
Var all_reduce(Tape& tape, const Var& x, comm::Communicator& group, const std::string& purpose);

}  // namespace capstan::ops
