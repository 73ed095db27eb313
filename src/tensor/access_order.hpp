// Finds missing waits on a device: accesses to the same memory by two queues, or by a queue and the host, of
// which one writes, that no event orders. It follows the calls of the host, so that it does not depend on
// when work runs.
//
// Of the host, it knows the accesses that are declared when they happen (Device::declare_host_access()) and
// the release of pinned buffers. Declared are those through PinnedBuffer, a buffer that PinnedPool lends
// again, what a channel passes to its transport, and the copies of a HostDevice. Three things are not found:
// an access of the host by address alone, the release of ordinary memory of the host, and a copy that is
// queued while a thread of the host or a transport still uses memory that was declared earlier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/device.hpp"

namespace capstan {

// Whether the two have a byte in common.
bool overlap(const ByteRows& a, const ByteRows& b);
// Whether `inner` is part of `outer`; false also where that is not found by comparing their first rows.
bool covers(const ByteRows& outer, const ByteRows& inner);

class AccessOrder {
 public:
  // Vector clock: for each queue, the number of its accesses that are ordered before a point.
  using Clock = std::vector<uint64_t>;

  // The clock of an event that is recorded on `queue` now.
  Clock record(Queue queue) { return clock_of(queue); }
  // Later work of `queue` runs after the event.
  void wait(Queue queue, const Clock& event);
  // The host has waited for the event: all work that it queues from now on runs after it.
  void wait_on_host(const Clock& event);
  // The host has waited for all queues.
  void wait_for_all();

  // Work queued next on `queue` reads or writes memory of a block, as does adding and removing the block, on
  // the compute queue. Memory outside of blocks is ordinary memory of the host. by: describes the work.
  // Returns the first missing wait, as a sentence that describes both accesses.
  std::optional<std::string> access(Queue queue, const ByteRows& memory, bool writes, const std::string& by);
  void add_block(std::byte* data, int64_t bytes);
  std::optional<std::string> remove_block(std::byte* data);

  enum class HostUse : uint8_t { reads, writes, releases };
  // Host memory that the host uses although it has not waited for work of `queue`.
  struct MissingHostWait {
    Queue queue;
    // Describes both uses.
    std::string text;
  };
  // The host uses memory of the host now. Returns the first missing wait.
  std::optional<MissingHostWait> host_access(const ByteRows& memory, HostUse use);
  // Whether the host may write the memory.
  bool is_idle(const ByteRows& memory) { return !host_access(memory, HostUse::writes); }
  // Pinned memory, which queues copy from and to. The host adds and removes it. name: for messages.
  void add_host_block(std::byte* data, int64_t bytes, std::string name) {
    blocks_[data] = {bytes, {}, std::move(name)};
  }
  std::optional<MissingHostWait> remove_host_block(std::byte* data);

 private:
  struct Access {
    size_t queue;
    // Number of the access on its queue, from 1.
    uint64_t number;
    bool writes;
    ByteRows memory;
    std::string by;
  };
  struct Block {
    int64_t bytes;
    // Accesses for which later work may have to wait.
    std::vector<Access> accesses;
    // Empty: memory of the device, or ordinary memory of the host.
    std::string name = {};
  };
  // The block that contains the memory; ordinary_ if there is none.
  Block& block_of(const ByteRows& memory);
  static void join(Clock& clock, const Clock& other);
  static uint64_t at(const Clock& clock, size_t queue) { return queue < clock.size() ? clock[queue] : 0; }
  // The clock of `queue`: all accesses that are ordered before the work that is queued next.
  Clock& clock_of(Queue queue);
  std::optional<std::string> add(Block& block, Access access);

  std::vector<Clock> clocks_;
  Clock host_;
  // Blocks by address, of the device and of the host.
  std::map<std::byte*, Block> blocks_;
  // Ordinary memory of the host. Accesses for which the host has waited are dropped with the next one.
  Block ordinary_{};
};

}  // namespace capstan
