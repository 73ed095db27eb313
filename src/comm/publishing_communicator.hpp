// A communicator that wraps another one and publishes every call in the rank status table.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

// Writes one rank's slot of the rank status table.
class StatusPublisher {
 public:
  // slots: for each rank of the world its slot in this host's table, -1 for ranks of other hosts.
  StatusPublisher(std::shared_ptr<RankStatusTable> status_table, std::vector<int> slots, int rank,
                  const std::string& host);
  RankStatusTable& status_table() { return *status_table_; }
  Slot& slot() { return *slot_; }
  // Null for a rank of another host.
  const Slot* slot_of(int rank) const;
  int rank() const { return slot_->rank; }

  void publish_state(RankState state) {
    slot_->since.store(monotonic_ns(), std::memory_order_relaxed);
    slot_->state.store(static_cast<int32_t>(state), std::memory_order_release);
  }
  void publish_call(Call call, int group, int peer, int64_t sequence, int64_t bytes);
  void publish_step(int64_t step) { slot_->step.store(step, std::memory_order_relaxed); }
  void publish_phase(std::string_view text);
  // Returns the index of the group's entry; -1 where the slot has no free entry.
  int add_group(const std::string& name, int first);
  void remove_group(int index);

 private:
  std::shared_ptr<RankStatusTable> status_table_;
  std::vector<int> slots_;
  Slot* slot_;
};

// Members of one collective must pass the same number of bytes. The wrapper compares what the members on this
// host published when the collective ends (groups of up to 16 ranks) and when it fails. A difference is
// ErrorCode::rank_failure and names both ranks.
std::unique_ptr<Communicator> make_publishing_communicator(std::unique_ptr<Communicator> inner,
                                                           std::shared_ptr<StatusPublisher> publisher);

}  // namespace capstan::comm
