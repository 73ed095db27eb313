#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// The logits of a router, fp32 [N, experts] = x[N, hidden] W^T. x and W[experts, hidden] are in the compute
// type; logits, their gradients and all sums are in fp32, because small differences decide which experts a
// token chooses. Saves x.
Var router_logits(Tape& tape, const Var& x, const Parameter& weight);

}  // namespace capstan::ops
