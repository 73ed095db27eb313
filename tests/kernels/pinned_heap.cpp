// The heap of the kernel tests on a GPU, without one.
#include "tests/kernels/pinned_heap.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

using capstan::test::PinnedHeap;

TEST_CASE("the heap of the kernel tests finds writes around a block, and uses blocks again") {
  std::vector<std::byte> memory(size_t{1} << 20);
  PinnedHeap heap;
  CHECK(!heap.is_open());
  heap.open(memory.data(), memory.size());
  for (const size_t alignment : {16, 64, 4096})
    for (const size_t bytes : {0, 1, 63, 64, 1000, 4096}) {
      CAPTURE(alignment);
      CAPTURE(bytes);
      auto* const data = static_cast<std::byte*>(heap.allocate(bytes, alignment));
      CHECK(reinterpret_cast<uintptr_t>(data) % alignment == 0);
      CHECK(heap.owns(data));
      for (size_t i = 0; i < bytes; ++i) data[i] = std::byte{1};
      CHECK(heap.is_intact(data));
      for (const std::ptrdiff_t at : {std::ptrdiff_t{-1}, -static_cast<std::ptrdiff_t>(PinnedHeap::kGuard),
                                      static_cast<std::ptrdiff_t>(bytes),
                                      static_cast<std::ptrdiff_t>(bytes + PinnedHeap::kGuard) - 1}) {
        CAPTURE(at);
        const std::byte before = data[at];
        data[at] = std::byte{1};
        CHECK(!heap.is_intact(data));
        data[at] = before;
      }
      heap.free(data);
      CHECK(heap.allocate(bytes, alignment) == data);
      heap.free(data);
    }
}
