// Collectives as operations: each has the backward that tensor parallelism needs.
#pragma once

#include "comm/communicator.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Forward: the sum over the group, on every rank. Backward: the gradient as it is (every rank holds the same one).
// What ends a row-parallel layer. fp32.
Var reduce_from_group(Tape& tape, const Var& x, comm::Communicator& group);

// Forward: x as it is. Backward: the sum of the gradients over the group. What begins a column-parallel layer. fp32.
Var copy_to_group(Tape& tape, const Var& x, comm::Communicator& group);

// Forward: the sum over the group. Backward: the sum over the group too: for values that every rank uses differently
// (statistics over all ranks' rows). fp32.
Var all_reduce(Tape& tape, const Var& x, comm::Communicator& group);

}  // namespace capstan::ops
