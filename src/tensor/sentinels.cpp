#include "tensor/sentinels.hpp"

#include <cstring>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "tensor/double_mapping.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define CAPSTAN_POISONS_SENTINELS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CAPSTAN_POISONS_SENTINELS 1
#endif
#endif
#ifdef CAPSTAN_POISONS_SENTINELS
#include <sanitizer/asan_interface.h>
#endif

namespace capstan {

namespace {
void poison([[maybe_unused]] const std::byte* begin, [[maybe_unused]] const std::byte* end) {
#ifdef CAPSTAN_POISONS_SENTINELS
  __asan_poison_memory_region(begin, static_cast<size_t>(end - begin));
#endif
}
// 0x7FF5 at even addresses: a NaN as bf16, fp16, fp32 and fp64, and another one than kNotWritten.
std::byte sentinel_at(const std::byte* address) {
  return reinterpret_cast<uintptr_t>(address) % 2 == 0 ? std::byte{0xF5} : std::byte{0x7F};
}
}  // namespace

void unpoison([[maybe_unused]] const std::byte* begin, [[maybe_unused]] const std::byte* end) {
#ifdef CAPSTAN_POISONS_SENTINELS
  __asan_unpoison_memory_region(begin, static_cast<size_t>(end - begin));
#endif
}
void write_sentinel(std::byte* begin, std::byte* end) {
  unpoison(begin, end);
  fill_alternating(begin, end - begin, sentinel_at(begin), sentinel_at(begin + 1));
  poison(begin, end);
}
const std::byte* changed_sentinel(const std::byte* begin, const std::byte* end) {
  unpoison(begin, end);
  const std::byte* at = begin;
  // The first two are right, and every other byte is the one two before it: nearly always.
  if (end - begin >= 2 && begin[0] == sentinel_at(begin) && begin[1] == sentinel_at(begin + 1) &&
      std::memcmp(begin, begin + 2, static_cast<size_t>(end - begin - 2)) == 0)
    at = end;
  while (at < end && *at == sentinel_at(at)) ++at;
  poison(begin, end);
  return at;
}

void Sentinels::write(const Block& block) {
  write_sentinel(block.data - kBytes, block.data);
  write_sentinel(block.data + block.bytes, block.data + block.end);
}

void Sentinels::verify(const Block& block, int64_t launches) {
  const std::byte* const end = block.data + block.end;
  const std::byte* at = changed_sentinel(block.data - kBytes, block.data);
  if (at == block.data) at = changed_sentinel(block.data + block.bytes, end);
  if (at == end) return;
  // Reported once.
  write(block);
  fail(ErrorCode::internal, "internal error: a kernel wrote at byte " + std::to_string(at - block.data) +
                                " of a block of " + std::to_string(block.bytes) + " bytes for " +
                                std::string(name_of(block.category)) + ": one of the launches " +
                                std::to_string(block.launches + 1) + " to " + std::to_string(launches) +
                                " of the queue compute, or work of another queue at that time");
}

Sentinels::Work Sentinels::add(std::byte* data, int64_t bytes, int64_t end, MemoryCategory category,
                               int64_t launches) {
  const Block block{data + distance_, bytes, end, category, launches};
  blocks_.insert_or_assign(data, block);
  return [block] { write(block); };
}

Sentinels::Work Sentinels::remove(std::byte* data, int64_t launches) {
  const auto found = blocks_.find(data);
  CAPSTAN_ASSERT(found != blocks_.end(), "a block without sentinels is freed");
  const Block block = found->second;
  blocks_.erase(found);
  return [block, launches] {
    const auto remove_both = [&] { unpoison(block.data - kBytes, block.data + block.end); };
    try {
      verify(block, launches);
    } catch (...) {
      remove_both();
      throw;
    }
    remove_both();
  };
}

Sentinels::Work Sentinels::check(int64_t launches) {
  std::vector<Block> all;
  all.reserve(blocks_.size());
  for (auto& [data, block] : blocks_) {
    // Another queue may begin to use its own; end_workspace() checks it.
    if (block.category == MemoryCategory::workspace) continue;
    all.push_back(block);
    block.launches = launches;
  }
  return [all = std::move(all), launches] {
    for (const Block& block : all) verify(block, launches);
  };
}

Sentinels::Work Sentinels::begin_workspace(kernels::Workspace workspace, bool kept) const {
  return [begin = workspace.data + distance_, bytes = static_cast<int64_t>(workspace.bytes),
          rounded = block_bytes(workspace), kept] {
    unpoison(begin, begin + bytes);
    // A block of the compute queue holds NaNs since it was freed.
    if (kept) fill_not_written(begin, bytes);
    write_sentinel(begin + bytes, begin + rounded);
  };
}

Sentinels::Work Sentinels::end_workspace(kernels::Workspace workspace, int64_t launch,
                                         std::string queue) const {
  return [begin = workspace.data + distance_, bytes = static_cast<int64_t>(workspace.bytes),
          rounded = block_bytes(workspace), launch, queue = std::move(queue)] {
    const std::byte* const end = begin + rounded;
    const std::byte* const at = changed_sentinel(begin + bytes, end);
    if (at != end)
      fail(ErrorCode::internal, "internal error: kernel " + std::to_string(launch) + " of the queue " +
                                    queue + " wrote at byte " + std::to_string(at - begin) +
                                    " of its workspace of " + std::to_string(bytes) + " bytes");
  };
}

}  // namespace capstan
