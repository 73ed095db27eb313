// An allocator over one growing range of addresses: it splits blocks that are too large, and joins free
// neighbors. It only computes offsets, so that a device and the estimate of its memory place blocks at
// the same offsets.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

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
  void put_back(int64_t offset);
  // Gives up free memory at the end, and returns its bytes.
  int64_t shrink();

  // Bytes of the range.
  int64_t end() const { return end_; }
  int64_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  void add_free(int64_t offset, int64_t size);
  void remove_free(int64_t offset);
  int64_t free_at_end() const;

  int64_t granularity_;
  int64_t end_ = 0;
  // Size by offset.
  std::map<int64_t, int64_t> free_, used_;
  // Size and offset of the free blocks.
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

}  // namespace capstan
