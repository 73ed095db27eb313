#include "comm/publishing_communicator.hpp"

#include <unistd.h>

#include <cstring>

#include "base/error.hpp"

namespace capstan::comm {

StatusPublisher::StatusPublisher(std::shared_ptr<RankStatusTable> status_table, std::vector<int> slots,
                                 int rank, const std::string& host)
    : status_table_(std::move(status_table)),
      slots_(std::move(slots)),
      slot_(&status_table_->slot(slots_[static_cast<size_t>(rank)])) {
  host.copy(slot_->host.data(), slot_->host.size() - 1);
  slot_->rank = rank;
  slot_->pid = static_cast<int32_t>(::getpid());
  slot_->group = -1;
  slot_->peer = -1;
  publish_state(RankState::working);
}

const Slot* StatusPublisher::slot_of(int rank) const {
  const int slot = slots_[static_cast<size_t>(rank)];
  return slot < 0 ? nullptr : &status_table_->slot(slot);
}

void StatusPublisher::publish_call(Call call, int group, int peer, int64_t sequence, int64_t bytes) {
  constexpr auto relaxed = std::memory_order_relaxed;
  slot_->call.store(static_cast<int32_t>(call), relaxed);
  slot_->group.store(group, relaxed);
  slot_->peer.store(peer, relaxed);
  slot_->sequence.store(sequence, relaxed);
  slot_->bytes.store(bytes, relaxed);
}

void StatusPublisher::publish_phase(std::string_view text) {
  std::array<char, 16> characters{};
  text.copy(characters.data(), characters.size());
  for (size_t i = 0; i < 2; ++i) {
    uint64_t part = 0;
    std::memcpy(&part, characters.data() + 8 * i, 8);
    slot_->phase[i].store(part, std::memory_order_relaxed);
  }
}

int StatusPublisher::add_group(const std::string& name, int first) {
  for (size_t i = 0; i < Slot::kGroups; ++i) {
    GroupSlot& entry = slot_->groups[i];
    if (entry.name[0] != '\0') continue;
    entry.first = first;
    entry.sequence = 0;
    for (auto& arguments : entry.arguments) arguments = 0;
    for (auto* count : {&entry.batches.started, &entry.batches.begun, &entry.batches.done}) *count = 0;
    entry.name.fill('\0');
    (name.empty() ? std::string("?") : name).copy(entry.name.data(), entry.name.size() - 1);
    return static_cast<int>(i);
  }
  return -1;
}
void StatusPublisher::remove_group(int index) {
  if (index >= 0) slot_->groups[static_cast<size_t>(index)].name[0] = '\0';
}

namespace {

class PublishingCommunicator final : public Communicator {
 public:
  PublishingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<StatusPublisher> publisher)
      : inner_(std::move(inner)), publisher_(std::move(publisher)) {
    // The members, and the index of this group in each member's slot.
    int32_t mine[2] = {publisher_->rank(), 0};
    std::vector<int32_t> ranks(static_cast<size_t>(size())), all(ranks.size() * 2);
    inner_->all_gather(mine, ranks.data(), sizeof mine[0]);
    entry_ = publisher_->add_group(inner_->name(), ranks[0]);
    mine[1] = entry_;
    inner_->all_gather(mine, all.data(), sizeof mine);
    for (size_t i = 0; i < ranks.size(); ++i) {
      const Slot* slot = publisher_->slot_of(all[2 * i]);
      const int entry = all[2 * i + 1];
      members_.push_back(
          {all[2 * i], slot && entry >= 0 ? &slot->groups[static_cast<size_t>(entry)] : nullptr});
    }
  }
  ~PublishingCommunicator() override { publisher_->remove_group(entry_); }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    Published published = enter(Call::split, 0, -1);
    published.begin_wait();
    auto part = inner_->split(color, key, name);
    if (!part->is_single()) part = make_publishing_communicator(std::move(part), publisher_);
    published.end_wait();
    return part;
  }

  WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    return start(Call::all_gather, bytes, -1, [&] { return inner_->start_all_gather(mine, all, bytes); });
  }
  WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    return start(Call::all_to_all, bytes, -1, [&] { return inner_->start_all_to_all(send, receive, bytes); });
  }
  WorkHandle start_broadcast(void* data, int64_t bytes, int root) override {
    return start(Call::broadcast, bytes, -1, [&] { return inner_->start_broadcast(data, bytes, root); });
  }
  WorkHandle start_send(const void* data, int64_t bytes, int to) override {
    return start(Call::send, bytes, to, [&] { return inner_->start_send(data, bytes, to); });
  }
  WorkHandle start_receive(void* data, int64_t bytes, int from) override {
    return start(Call::receive, bytes, from, [&] { return inner_->start_receive(data, bytes, from); });
  }
  void barrier() override {
    Published one = enter(Call::barrier, 0, -1);
    one.begin_wait();
    inner_->barrier();
    one.end_wait();
  }
  int64_t sent_bytes() const override { return inner_->sent_bytes(); }
  DeviceBatches* device_batches() override {
    return entry_ < 0 ? nullptr : &publisher_->slot().groups[static_cast<size_t>(entry_)].batches;
  }

 private:
  struct Member {
    int rank;
    // Null for a rank on another host.
    const GroupSlot* entry;
  };

  // One call in progress. The communicator outlives its work, as with MPI.
  struct Published {
    PublishingCommunicator* group;
    Call call;
    // World rank; -1 for a collective.
    int peer;
    int64_t sequence, bytes;
    void begin_wait() const {
      group->publisher_->publish_call(call, group->entry_, peer, sequence, bytes);
      group->publisher_->publish_state(RankState::waiting);
    }
    void end_wait() const { group->publisher_->publish_state(RankState::working); }
  };
  class PublishedWork final : public Work {
   public:
    PublishedWork(const Published& published, WorkHandle inner)
        : published_(published), inner_(std::move(inner)) {}
    ~PublishedWork() override {
      if (!inner_) return;
      published_.begin_wait();
      inner_.reset();
      published_.end_wait();
    }
    void wait() override {
      if (!inner_) return;
      published_.begin_wait();
      try {
        inner_->wait();
      } catch (Error&) {
        inner_.reset();
        published_.group->compare(published_, true);
        throw;
      }
      inner_.reset();
      published_.end_wait();
      published_.group->compare(published_, false);
    }

   private:
    Published published_;
    WorkHandle inner_;
  };

  // Publishes the call before `start_inner` begins it.
  template <typename Start>
  WorkHandle start(Call call, int64_t bytes, int peer, Start start_inner) {
    const Published published = enter(call, bytes, peer);
    return std::make_unique<PublishedWork>(published, start_inner());
  }
  // A message names its peer by group rank; the table uses world ranks.
  Published enter(Call call, int64_t bytes, int peer) {
    const int world_peer = peer < 0 ? -1 : members_[static_cast<size_t>(peer)].rank;
    int64_t sequence = 0;
    if (peer < 0) {
      sequence = ++entered_;
      if (entry_ >= 0) {
        GroupSlot& entry = publisher_->slot().groups[static_cast<size_t>(entry_)];
        entry.arguments[static_cast<size_t>(sequence) % GroupSlot::kKeptCalls].store(
            encode_arguments(call, bytes), std::memory_order_release);
        entry.sequence.store(sequence, std::memory_order_release);
      }
    }
    return {this, call, world_peer, sequence, bytes};
  }

  // Throws where a member on this host passed different arguments to the same collective.
  void compare(const Published& mine, bool failed) const {
    constexpr size_t kMaxComparedMembers = 16;
    if (mine.peer >= 0 || (members_.size() > kMaxComparedMembers && !failed)) return;
    const int64_t arguments = encode_arguments(mine.call, mine.bytes);
    for (const Member& member : members_) {
      if (!member.entry) continue;
      // True while the member still keeps the collective's arguments.
      const auto kept = [&] {
        const int64_t entered = member.entry->sequence.load(std::memory_order_acquire);
        return entered >= mine.sequence &&
               entered < mine.sequence + static_cast<int64_t>(GroupSlot::kKeptCalls) - 1;
      };
      if (!kept()) continue;
      const int64_t theirs =
          member.entry->arguments[static_cast<size_t>(mine.sequence) % GroupSlot::kKeptCalls].load(
              std::memory_order_acquire);
      if (theirs == arguments || !kept()) continue;
      fail(ErrorCode::rank_failure,
           "ranks disagree about collective " + std::to_string(mine.sequence) + " of group `" + name() +
               "`: rank " + std::to_string(publisher_->rank()) + " asks for " +
               std::string(name_of(mine.call)) + " of " + std::to_string(mine.bytes) + " bytes, rank " +
               std::to_string(member.rank) + " for " + std::string(name_of(static_cast<Call>(theirs & 15))) +
               " of " + std::to_string(theirs >> 4) + " bytes");
    }
  }

  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<StatusPublisher> publisher_;
  std::vector<Member> members_;
  int entry_ = -1;
  int64_t entered_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_publishing_communicator(std::unique_ptr<Communicator> inner,
                                                           std::shared_ptr<StatusPublisher> publisher) {
  return std::make_unique<PublishingCommunicator>(std::move(inner), std::move(publisher));
}

}  // namespace capstan::comm
