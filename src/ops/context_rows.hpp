// The tokens of a sequence that a rank of a context-parallel group holds. Late causal queries see more keys
// than early ones. To balance the work, a sequence is divided into 2 * CP equal chunks, and rank r holds
// chunks r and 2 * CP - 1 - r, in this order. Rows of a rank's activations are sequence by sequence, each `S
// / CP` rows.
#pragma once

#include "kernels/context_attention.hpp"

namespace capstan::ops {

// The global positions of rank's rows of a sequence of `seq` tokens. A single rank holds one range of any
// length. ErrorCode::config with the nearest valid lengths when 2 * ranks does not divide seq.
kernels::PositionSegments context_rows(int64_t ranks, int64_t rank, int64_t seq);

}  // namespace capstan::ops
