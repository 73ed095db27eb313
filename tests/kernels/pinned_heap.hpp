// The heap of the kernel tests on a GPU (gpu_table.cpp), in memory that kernels can access. All of it is one
// allocation of CUDA, so that compute-sanitizer finds no access between two blocks: bytes around each block
// show what was written there.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace capstan::test {

// Blocks of powers of two, which are used again.
class PinnedHeap {
 public:
  // Bytes before and after a block's data that nobody may change.
  static constexpr size_t kGuard = 64;

  // From now on blocks lie in these bytes.
  void open(std::byte* memory, size_t bytes) { next_ = first_ = memory, end_ = memory + bytes; }
  bool is_open() const { return first_ != nullptr; }
  bool owns(const void* block) const { return block >= first_ && block < end_; }
  void* allocate(size_t bytes, size_t alignment) {
    const size_t size = std::bit_ceil(sizeof(Header) + kGuard + alignment + bytes + kGuard);
    const std::lock_guard lock(mutex_);
    std::byte* block = free_[std::countr_zero(size)];
    if (block) {
      free_[std::countr_zero(size)] = *reinterpret_cast<std::byte**>(block);
    } else {
      if (static_cast<size_t>(end_ - next_) < size) {
        std::fputs("the pinned heap of the kernel tests is full\n", stderr);
        std::abort();
      }
      block = next_;
      next_ += size;
    }
    const auto after = reinterpret_cast<uintptr_t>(block) + sizeof(Header) + kGuard;
    std::byte* const data =
        block + ((after + alignment - 1) / alignment * alignment - after) + sizeof(Header) + kGuard;
    *header_of(data) = {block, size, bytes};
    std::fill_n(data - kGuard, kGuard, kMark);
    std::fill_n(data + bytes, kGuard, kMark);
    return data;
  }
  // Whether the bytes before and after the data are as they were.
  bool is_intact(const void* data) const {
    const auto* const begin = static_cast<const std::byte*>(data);
    const std::byte* const end = begin + header_of(const_cast<std::byte*>(begin))->bytes;
    const auto marked = [](std::byte byte) { return byte == kMark; };
    return std::all_of(begin - kGuard, begin, marked) && std::all_of(end, end + kGuard, marked);
  }
  void free(void* data) {
    if (!is_intact(data)) {
      std::fputs("a kernel test has written outside of a block of its heap\n", stderr);
      std::abort();
    }
    const Header header = *header_of(static_cast<std::byte*>(data));
    const std::lock_guard lock(mutex_);
    std::byte*& first = free_[std::countr_zero(header.size)];
    *reinterpret_cast<std::byte**>(header.block) = first;
    first = header.block;
  }

 private:
  static constexpr std::byte kMark{0xa5};
  // Before the guard that precedes the data.
  struct alignas(16) Header {
    std::byte* block;
    // Of the block, and of its data.
    size_t size, bytes;
  };
  static Header* header_of(std::byte* data) {
    return reinterpret_cast<Header*>(data - kGuard - sizeof(Header));
  }
  std::mutex mutex_;
  std::byte *first_ = nullptr, *next_ = nullptr, *end_ = nullptr;
  // By the logarithm of their size.
  std::byte* free_[64] = {};
};

}  // namespace capstan::test
