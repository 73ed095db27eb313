// Parallel loops of CPU kernels. The block size depends on the shape alone, so that results do not depend on
// the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// The size of each of `parts` of n, a multiple of `unit`.
inline int64_t even_size(int64_t n, int64_t parts, int64_t unit) {
  return std::max(unit, round_up(ceil_div(n, parts), unit));
}

// body(begin, end, worker) for consecutive blocks of [0, n).
template <class Body>
void parallel_blocks(Context& context, int64_t n, int64_t block, Body&& body) {
  if (n <= 0) return;
  context.pool->parallel_for(ceil_div(n, block), [&](int64_t tile, int worker) {
    body(tile * block, std::min(n, (tile + 1) * block), worker);
  });
}

// Rows to a block: about 16 Ki elements, the unit below which waking a thread costs more than it saves.
inline int64_t rows_per_block(int64_t cols) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols));
}

// Allocates `bytes` of scratch memory for every worker before the parallel loop, so that the peak does not
// depend on the schedule.
inline void reserve_scratch(Context& context, size_t bytes) {
  context.prepare(context.pool->size());
  for (int worker = 0; worker < context.pool->size(); ++worker) context.scratch(worker, bytes);
}

// The same with the launch's own scratch, which it returns.
inline std::byte* reserve_scratch(Context& context, WorkspaceSize need) {
  reserve_scratch(context, need.each_worker);
  return context.scratch(Context::kShared, need.shared);
}

}  // namespace capstan::kernels
