// A communicator that posts on the failure board what it is asked to do, around another one that does it.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

// A rank's own place on the board.
class StatusPublisher {
 public:
  // slots: of each rank of the world its slot on this host's board, -1 on another host.
  StatusPublisher(std::shared_ptr<RankStatusTable> status_table, std::vector<int> slots, int rank,
                  const std::string& host);
  RankStatusTable& status_table() { return *status_table_; }
  Slot& mine() { return *mine_; }
  // Null for a rank of another host.
  const Slot* of(int rank) const;
  int rank() const { return mine_->rank; }

  void state(RankState what) {
    mine_->since.store(monotonic_ns(), std::memory_order_relaxed);
    mine_->state.store(static_cast<int32_t>(what), std::memory_order_release);
  }
  void call(Call call, int group, int peer, int64_t sequence, int64_t bytes);
  void step(int64_t step) { mine_->step.store(step, std::memory_order_relaxed); }
  void phase(std::string_view text);
  int add_group(const std::string& name,
                int first);  // index of its entry; -1: there is no room, it is not counted
  void remove_group(int index);

 private:
  std::shared_ptr<RankStatusTable> status_table_;
  std::vector<int> slots_;
  Slot* mine_;
};

// Members of the same collective must ask for the same bytes: what the members on this host have posted is compared when the
// collective has ended (groups of up to 16), and when it ends with an error. A difference is ErrorCode::rank_failure and
// names both.
std::unique_ptr<Communicator> make_publishing_communicator(std::unique_ptr<Communicator> inner,
                                                           std::shared_ptr<StatusPublisher> publisher);

}  // namespace capstan::comm
