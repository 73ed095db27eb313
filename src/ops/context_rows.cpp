#include "ops/context_rows.hpp"

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan::ops {

kernels::PositionSegments context_rows(int64_t ranks, int64_t rank, int64_t seq) {
  CAPSTAN_ASSERT(ranks > 0 && rank >= 0 && rank < ranks && seq > 0,
                 "context_rows of rank " + std::to_string(rank) + " of " + std::to_string(ranks) + ", " +
                     std::to_string(seq) + " tokens");
  if (ranks == 1) return {{{{0, seq}, {}}}};
  const int64_t chunks = 2 * ranks, chunk = seq / chunks;
  if (seq % chunks != 0) {
    std::string nearest = std::to_string((chunk + 1) * chunks);
    if (chunk > 0) nearest = std::to_string(chunk * chunks) + " and " + nearest;
    fail(ErrorCode::config,
         "a sequence of " + std::to_string(seq) + " tokens cannot be split into 2 * " +
             std::to_string(ranks) + " = " + std::to_string(chunks) + " equal chunks for context parallelism",
         "the nearest legal model.seq_length: " + nearest);
  }
  return {{{{rank * chunk, chunk}, {(chunks - 1 - rank) * chunk, chunk}}}};
}

}  // namespace capstan::ops
