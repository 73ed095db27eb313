#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// The logits of a router, fp32 [N, experts] = x[N, hidden] W^T, W[experts, hidden] in the compute type. Sums,
// logits and the products of the backward pass are in fp32 whatever the compute type, because small
// differences decide which experts a token chooses. Saves x.
Var router_logits(Tape& tape, const Var& x, const Parameter& weight);

}  // namespace capstan::ops
