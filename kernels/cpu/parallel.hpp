// Parallel loops and workspaces of CPU kernels. The block size depends on the shape alone, so that results do
// not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked.hpp"
#include "base/thread_pool.hpp"
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

// Number of rows of a block with about 16 Ki elements. For less, waking a thread costs more than it saves.
inline int64_t rows_per_block(int64_t cols) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols));
}

// The workspace of a launch, divided as its WorkspaceSize says. False where the launch was given less: this
// is reported in the error slot, and the kernel returns.
class WorkspaceParts {
 public:
  // The last arguments are where the caller is (std::source_location, which some compilers lack).
  WorkspaceParts(Context& context, WorkspaceSize need, const char* file = __builtin_FILE(),
                 const char* function = __builtin_FUNCTION())
      : data_(context.workspace.data),
        workers_(WorkspaceSize::aligned(need.shared)),
        each_worker_(WorkspaceSize::aligned(need.each_worker)) {
    const size_t needed = need.total(context.pool->size());
    enough_ = needed <= context.workspace.bytes;
    if (!enough_) *context.error = {file, function, needed, context.workspace.bytes};
  }
  explicit operator bool() const { return enough_; }
  template <class T>
  T* shared() const {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  T* worker(int worker) const {
    return reinterpret_cast<T*>(data_ + workers_ + static_cast<size_t>(worker) * each_worker_);
  }

 private:
  std::byte* data_;
  // Bytes from the beginning to the parts of the workers, and from one to the next.
  size_t workers_, each_worker_;
  bool enough_;
};

}  // namespace capstan::kernels
