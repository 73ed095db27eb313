// Which tokens of a sequence a rank of a context-parallel group holds. A causal query at the end sees more keys than one at the
// beginning, so a sequence is cut into 2 * CP equal chunks and rank r holds chunk r and chunk 2 * CP - 1 - r, in this
// order: everybody has the same work. Rows of a rank's activations are sequence by sequence, each `S / CP` rows.
#pragma once

#include "kernels/context_attention.hpp"

namespace capstan::ops {

// The global positions of rank's rows of a sequence of `seq` tokens. One rank holds one run, of any length. ErrorCode::config
// with the nearest legal lengths when seq does not divide by 2 * ranks.
kernels::PositionRuns context_rows(int64_t ranks, int64_t rank, int64_t seq);

}  // namespace capstan::ops
