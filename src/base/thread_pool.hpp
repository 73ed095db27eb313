// The one pool of threads of a process. Work is split into tiles by its shape, never by the thread count, so
// that results do not depend on how many threads there are: which thread runs a tile is free, what the tile
// computes is not.
#pragma once

#include <cstdint>
#include <memory>

#include "base/function_ref.hpp"

namespace capstan {

class ThreadPool {
 public:
  // threads counts the caller too: ThreadPool(1) starts none. 0 means the cores that this process may use.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs body(tile, worker) for every tile in [0, tiles), 0 <= worker < size(), and returns when all are
  // done. The caller works too. The first exception is rethrown here after the others have ended. A call from
  // within a body runs inline. Calls from several threads at once are serialized.
  void parallel_for(int64_t tiles, FunctionRef<void(int64_t tile, int worker)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
  int size_;
};

// Cores in this process's affinity mask (at least 1).
int available_cores();

}  // namespace capstan
