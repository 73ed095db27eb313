#include "tensor/block_allocator.hpp"

#include <algorithm>
#include <iterator>

#include "base/checked.hpp"

namespace capstan {

int64_t BlockAllocator::free_at_end() const {
  if (free_.empty()) return 0;
  const Block& last = free_.back();
  return last.offset + last.size == end_ ? last.size : 0;
}

std::optional<int64_t> BlockAllocator::take(int64_t size) {
  auto found = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->size == size) {
      found = block;
      break;
    }
    if (block->size > size && found == free_.end()) found = block;
  }
  if (found == free_.end()) return std::nullopt;
  const int64_t offset = found->offset;
  if (found->size == size)
    free_.erase(found);
  else
    *found = {offset + size, found->size - size};
  return offset;
}

int64_t BlockAllocator::missing(int64_t size) const {
  return round_up(size - free_at_end(), granularity_);
}

void BlockAllocator::grow(int64_t bytes) {
  if (free_at_end() > 0)
    free_.back().size += bytes;
  else
    free_.push_back({end_, bytes});
  end_ += bytes;
}

void BlockAllocator::put_back(int64_t offset, int64_t size) {
  const auto after = std::lower_bound(free_.begin(), free_.end(), offset,
                                      [](const Block& block, int64_t at) { return block.offset < at; });
  const bool joins_after = after != free_.end() && after->offset == offset + size;
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->offset + before->size == offset) {
      before->size += size + (joins_after ? after->size : 0);
      if (joins_after) free_.erase(after);
      return;
    }
  }
  if (joins_after)
    *after = {offset, size + after->size};
  else
    free_.insert(after, {offset, size});
}

int64_t BlockAllocator::shrink() {
  const int64_t at_end = free_at_end(), bytes = at_end / granularity_ * granularity_;
  if (bytes == 0) return 0;
  if (at_end > bytes)
    free_.back().size -= bytes;
  else
    free_.pop_back();
  end_ -= bytes;
  return bytes;
}

}  // namespace capstan
