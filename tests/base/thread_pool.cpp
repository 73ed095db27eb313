#include "base/thread_pool.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

using capstan::ThreadPool;

TEST_CASE("every tile runs exactly once, whatever the number of threads") {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (int64_t tiles : {0, 1, 2, 5, 64, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(tiles));
      pool.parallel_for(tiles, [&](int64_t tile, int worker) {
        CHECK(worker < threads);
        hits[static_cast<size_t>(tile)]++;
      });
      for (auto& hit : hits) CHECK(hit.load() == 1);
    }
  }
}

TEST_CASE("an exception in a tile reaches the caller and the pool goes on") {
  ThreadPool pool(3);
  CHECK_THROWS_AS(pool.parallel_for(100,
                                    [](int64_t tile, int) {
                                      if (tile == 37) throw std::runtime_error("tile");
                                    }),
                  std::runtime_error);
  std::atomic<int> count{0};
  pool.parallel_for(10, [&](int64_t, int) { count++; });
  CHECK(count.load() == 10);
}

TEST_CASE("a nested call runs inline; calls from several threads are serialized") {
  ThreadPool pool(2);
  std::atomic<int> count{0};
  const auto job = [&] {
    for (int i = 0; i < 50; ++i)
      pool.parallel_for(4, [&](int64_t, int) { pool.parallel_for(3, [&](int64_t, int) { count++; }); });
  };
  std::thread other(job);
  job();
  other.join();
  CHECK(count.load() == 2 * 50 * 4 * 3);
}
