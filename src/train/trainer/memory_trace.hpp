// What the steps of a rank allocate and free on the meta device, recorded for a few micro-batches and played
// again for all of them. The actions of more micro-batches allocate and free the same, but the gaps that they
// leave between the blocks grow: memory that the allocator has reserved is known only after all of them. To
// play an action takes a tenth of the time of its operations.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "parallel/schedule.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

class MemoryTrace final : public MemoryListener {
 public:
  // actions: those of each recorded step. part: which of them a complete step has more often.
  MemoryTrace(std::vector<parallel::PipelineAction> actions, const parallel::ShorterStep& part);

  // ---- recording, as the listener of a device

  void begin_step();
  // The next of `actions`.
  void begin_action();
  void end_step();
  void allocated(const std::byte* data, int64_t bytes, MemoryCategory category) override;
  void freed(const std::byte* data, int64_t bytes, MemoryCategory category) override;
  void pinned(int64_t bytes, MemoryCategory category) override;

  // Whether in every step the actions that repeat allocated and freed the same as those of the period before,
  // for the next micro-batches.
  bool repeats() const;
  // Allocates and frees on `device` what complete steps do, but for pinned memory, of which it has what was
  // recorded: MicroBatchRunner::reserve_uploads() allocates it for all micro-batches. Needs repeats().
  void replay(Device& device) const;

 private:
  enum class Kind : uint8_t { allocate, free, pin };
  struct Event {
    Kind kind;
    MemoryCategory category;
    int64_t bytes;
    // The block that is allocated or freed, as its number among all.
    int64_t block;
  };
  // The events of an action of a step, or those before, between and after steps (step -1).
  struct Segment {
    int64_t step = -1;
    int64_t action = -1;
    size_t first_event = 0;
    int64_t first_block = 0;
  };
  struct Block {
    size_t segment;
    int64_t bytes;
    MemoryCategory category;
  };
  // Blocks of successive micro-batches that have the same part in them. The first is freed in the period, and
  // the last is allocated in it.
  using Chain = std::vector<int64_t>;

  void begin_segment(int64_t step, int64_t action);
  size_t end_of(size_t segment) const {
    return segment + 1 < segments_.size() ? segments_[segment + 1].first_event : events_.size();
  }
  // The block of the same action of the micro-batches that come next; -1: there is none.
  int64_t successor(int64_t block) const;
  bool same_events(size_t segment, size_t before) const;
  // The segment of an action of a step.
  size_t segment_of(int64_t step, int64_t action) const {
    return step_segments_[static_cast<size_t>(step)] + static_cast<size_t>(action);
  }
  // For each free in the period of a step; empty: a block does not repeat.
  std::vector<Chain> chains(int64_t step) const;
  // The event, of the block at `address`.
  static void play(Device& device, const Event& event, std::byte*& address);
  void play_repetitions(Device& device, int64_t step, std::vector<std::byte*>& addresses) const;

  const std::vector<parallel::PipelineAction> actions_;
  const parallel::ShorterStep part_;
  // For each action that of the same kind and chunk, `part_.group` micro-batches later; -1: none.
  std::vector<int64_t> next_actions_;
  std::vector<Event> events_;
  std::vector<Segment> segments_;
  std::vector<Block> blocks_;
  // The segment of the first action of each step.
  std::vector<size_t> step_segments_;
  std::unordered_map<const std::byte*, int64_t> in_use_;
};

}  // namespace capstan::train
