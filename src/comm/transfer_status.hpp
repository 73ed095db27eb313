// The transfers for which the queues of the ranks wait, in shared memory: finds ranks whose transfers wait
// for each other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/channel.hpp"
#include "comm/shared_memory.hpp"

namespace capstan::comm {

// A transfer with one peer, of the batch that a channel is working on.
struct TransferSlot {
  // kind: a TransferBatch::Kind. peer: world rank.
  std::atomic<int32_t> kind, peer;
  // 1: to the peer, 0: from it.
  std::atomic<int32_t> sends;
  // The peer has reached this transfer.
  std::atomic<int32_t> matched;
  std::atomic<int64_t> bytes;
};

enum class ChannelState : int32_t {
  idle,
  // The first batch waits for work that was queued before it, until ChannelSlot::ready has its number.
  waits_for_compute,
  transfers,
};

// How many batches of another channel a rank has started.
struct StartedBatches {
  std::atomic<int64_t> id, count;
};

// A channel of one rank.
struct ChannelSlot {
  static constexpr size_t kTransfers = 64, kOthers = 48, kKeptTexts = 16;
  // The same on all members; 0: free.
  std::atomic<int64_t> id;
  std::array<char, 32> group;
  std::atomic<int32_t> state;
  // The number of the batch, from 1, and its transfers.
  std::atomic<int64_t> batch;
  std::atomic<int32_t> count;
  // The last batch before which the work is done, as the queue of that work says: a busy machine may keep the
  // thread of the transfers from running for long.
  std::atomic<int64_t> ready;
  std::array<TransferSlot, kTransfers> transfers;
  // The world rank that found this channel in a deadlock, plus 1; 0: none.
  std::atomic<int32_t> deadlock_found_by;
  // Batches that the host has started, and at n % kKeptTexts the text of batch n.
  std::atomic<int64_t> started;
  std::array<std::array<char, 64>, kKeptTexts> texts;
  // Whether its batches have an order among those of other channels: not on the links of a pipeline, where a
  // stage posts receives early.
  std::atomic<int32_t> ordered;
  // The other ordered channels, when the host started the batch `batch`.
  std::array<StartedBatches, kOthers> before;
};

class TransferStatus {
 public:
  // Collective over the world, whose ranks are on one host (else ErrorCode::unsupported).
  explicit TransferStatus(Communicator& world);

  // This rank's slot for a channel of the group; collective over the group.
  ChannelSlot& add(Communicator& group);
  int rank() const { return rank_; }
  // The group rank's rank in the world; collective over the group.
  static std::vector<int> world_ranks(Communicator& group, int mine);

  // The compute queue waits for a batch of a channel; id 0: it does not.
  void compute_waits(int64_t id, int64_t batch);

  // The order in which a rank starts the batches of its channels. NCCL may deadlock where two ranks start the
  // batches of two groups that they share in different orders.
  using StartOrder = std::vector<std::pair<int64_t, int64_t>>;
  // Counts a batch as started. Returns the ids of the other ordered channels, and how many batches of each
  // this rank has started before.
  StartOrder start(ChannelSlot& mine, const std::string& text);
  // The order of the current batch, before its first transfer.
  static void publish_order(ChannelSlot& mine, const StartOrder& order);
  // The first batch of another channel that this rank starts before the current batch of `mine`, and the
  // world rank `peer` after it, or the other way round: a sentence about both batches. nullopt: there is
  // none. The peer is in the same batch.
  std::optional<std::string> different_order(const ChannelSlot& mine, int peer) const;

  // Ranks that wait for each other.
  struct Deadlock {
    // The ranks with their transfers.
    std::string text;
    // World rank and id of each.
    std::vector<std::pair<int, int64_t>> channels;
  };
  // The deadlock that blocks this rank's channel; nullopt: it may continue. Only two equal results some time
  // apart prove a deadlock.
  std::optional<Deadlock> deadlock(const ChannelSlot& mine) const;
  // Records a deadlock at all its channels: after the first of them fails, the others could not find it.
  void report(const Deadlock& deadlock);
  // The report of another rank about a deadlock that this rank's channel is in; nullopt: there is none.
  std::optional<std::string> reported(const ChannelSlot& mine) const;

 private:
  static constexpr size_t kChannels = ChannelSlot::kOthers;
  struct RankSlot {
    std::atomic<int64_t> waits_for, waits_for_batch;
    // The last deadlock that this rank has found.
    std::array<char, 2048> deadlock;
    std::array<ChannelSlot, kChannels> channels;
  };
  struct Search;
  RankSlot& slot(int rank) const { return reinterpret_cast<RankSlot*>(memory_.data())[rank]; }
  ChannelSlot* find(int rank, int64_t id) const;
  // "transfer batch 3 of group `dp` (all_gather of 32 bytes)", a batch that this rank has started.
  std::string batch_text(int rank, int64_t id, int64_t number) const;
  bool blocked(Search& search, int rank, int64_t id) const;
  bool compute_blocked(Search& search, int rank) const;

  int rank_;
  SharedMemory memory_;
  int64_t created_ = 0;
};

}  // namespace capstan::comm
