// Finds kernels that write outside of their blocks. A device that debugs has bytes before and after each
// block, the sentinels, which nothing may change: they are written when the block is allocated, and checked
// when it is freed and where the host waits for results. In a build with the address sanitizer an access to
// them, also a read, is an error of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>

#include "tensor/device.hpp"

namespace capstan {

// Bytes that nothing may change. They are a NaN in every type for kernels that read them.
void write_sentinel(std::byte* begin, std::byte* end);
// Returns the first changed byte; `end` if there is none.
const std::byte* changed_sentinel(const std::byte* begin, const std::byte* end);
// Lets kernels use bytes that may have been sentinels: the address sanitizer reports accesses to these.
void unpoison(const std::byte* begin, const std::byte* end);

// The sentinels of a device's blocks. Each function returns work for the compute queue, in whose order blocks
// are allocated and freed.
class Sentinels {
 public:
  using Work = std::function<void()>;
  // Bytes before a block, and at least as many between the end of a tensor and the sentinels of the next
  // block. Multiples of it keep the alignment of blocks.
  static constexpr int64_t kBytes = 256;

  // distance: from the addresses of blocks to those that kernels use. rules: those of the device's allocator,
  // which rounds the sizes of blocks.
  Sentinels(std::ptrdiff_t distance, const AllocatorRules& rules) : distance_(distance), rules_(rules) {}

  // Writes the sentinels of a block for `bytes` bytes at `data`; they end at data + end. launches, also
  // below: number of launches on the compute queue so far.
  Work add(std::byte* data, int64_t bytes, int64_t end, MemoryCategory category, int64_t launches);
  // Checks the sentinels of a block that is freed.
  Work remove(std::byte* data, int64_t launches);
  // Checks the sentinels of all blocks except workspaces.
  Work check(int64_t launches);

  // Writes the sentinels after the workspace of a launch, before it, and checks them, after it. The queue of
  // the launch runs the work. kept: the block stays that of the queue.
  Work begin_workspace(kernels::Workspace workspace, bool kept) const;
  Work end_workspace(kernels::Workspace workspace, int64_t launch, std::string queue) const;

 private:
  struct Block {
    // Address of the block as kernels see it.
    std::byte* data;
    int64_t bytes, end;
    MemoryCategory category;
    // Launches of the compute queue when the sentinels were last seen intact.
    int64_t launches;
  };
  static void write(const Block& block);
  int64_t block_bytes(kernels::Workspace workspace) const {
    return rules_.round(static_cast<int64_t>(workspace.bytes));
  }
  // Throws where the block's sentinels have changed.
  static void verify(const Block& block, int64_t launches);

  const std::ptrdiff_t distance_;
  const AllocatorRules rules_;
  std::unordered_map<std::byte*, Block> blocks_;
};

}  // namespace capstan
