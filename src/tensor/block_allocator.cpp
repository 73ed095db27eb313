#include "tensor/block_allocator.hpp"

#include <iterator>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan {

void BlockAllocator::add_free(int64_t offset, int64_t size) {
  free_.emplace(offset, size);
  by_size_.emplace(size, offset);
}
void BlockAllocator::remove_free(int64_t offset) {
  const auto found = free_.find(offset);
  by_size_.erase({found->second, offset});
  free_.erase(found);
}
int64_t BlockAllocator::free_at_end() const {
  if (free_.empty()) return 0;
  const auto& [offset, size] = *free_.rbegin();
  return offset + size == end_ ? size : 0;
}

std::optional<int64_t> BlockAllocator::take(int64_t size) {
  const auto same = by_size_.lower_bound({size, 0});
  if (same == by_size_.end()) return std::nullopt;
  auto block = free_.begin();
  if (same->first == size)
    block = free_.find(same->second);
  else
    while (block->second < size) ++block;
  const auto [offset, had] = *block;
  remove_free(offset);
  if (had > size) add_free(offset + size, had - size);
  used_.emplace(offset, size);
  return offset;
}

int64_t BlockAllocator::missing(int64_t size) const {
  return round_up(size - free_at_end(), granularity_);
}

void BlockAllocator::grow(int64_t bytes) {
  const int64_t before = free_at_end();
  if (before > 0) remove_free(end_ - before);
  add_free(end_ - before, before + bytes);
  end_ += bytes;
}

void BlockAllocator::put_back(int64_t offset) {
  const auto found = used_.find(offset);
  CAPSTAN_ASSERT(found != used_.end(), "memory is freed that was not allocated");
  int64_t begin = offset, size = found->second;
  used_.erase(found);
  const auto next = free_.lower_bound(begin);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) begin = before->first, size += before->second;
  }
  if (const auto after = free_.find(begin + size); after != free_.end()) {
    size += after->second;
    remove_free(after->first);
  }
  if (begin < offset) remove_free(begin);
  add_free(begin, size);
}

int64_t BlockAllocator::shrink() {
  const int64_t at_end = free_at_end(), bytes = at_end / granularity_ * granularity_;
  if (bytes == 0) return 0;
  remove_free(end_ - at_end);
  if (at_end > bytes) add_free(end_ - at_end, at_end - bytes);
  end_ -= bytes;
  return bytes;
}

}  // namespace capstan
