// An allocator over one growing range of addresses: it splits blocks that are too large, and joins free
// neighbors. It only computes offsets, so that a device and the estimate of its memory place blocks at
// the same offsets.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace capstan {

class BlockAllocator {
 public:
  // granularity: the range grows and shrinks by multiples of it, in bytes.
  explicit BlockAllocator(int64_t granularity) : granularity_(granularity) {}

  // The offset of a free block of exactly `size` bytes, else of the first one that holds them; nullopt: no
  // free block is large enough. The smallest one that holds them would leave small gaps, which stay when
  // large buffers come and go, as those of ZeRO 3 do.
  std::optional<int64_t> take(int64_t size);
  // The bytes by which the range must grow for a block of `size` bytes, which may begin in a free block at
  // the end.
  int64_t missing(int64_t size) const;
  void grow(int64_t bytes);
  // The block at `offset` of `size` bytes, as it was taken.
  void put_back(int64_t offset, int64_t size);
  // Gives up free memory at the end, and returns its bytes.
  int64_t shrink();

  // Bytes of the range.
  int64_t end() const { return end_; }

 private:
  struct Block {
    int64_t offset, size;
  };
  int64_t free_at_end() const;

  int64_t granularity_;
  int64_t end_ = 0;
  // Free blocks by offset. There are some hundred at most, in which a search takes less time than in a tree.
  std::vector<Block> free_;
};

}  // namespace capstan
