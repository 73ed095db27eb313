#include "comm/transfer_status.hpp"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "comm/mesh.hpp"

namespace capstan::comm {

TransferStatus::TransferStatus(Communicator& world)
    : rank_(world.rank()), memory_(world, sizeof(RankSlot) * static_cast<size_t>(world.size())) {}

std::vector<int> TransferStatus::world_ranks(Communicator& group, int mine) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  group.all_gather(&mine, ranks.data(), sizeof mine);
  return ranks;
}

ChannelSlot& TransferStatus::add(Communicator& group) {
  auto& channels = slot(rank_).channels;
  const auto mine = std::ranges::find_if(channels, [](const ChannelSlot& c) { return c.id.load() == 0; });
  CAPSTAN_ASSERT(mine != channels.end(), "more channels than the status table has");
  // Unique by the first member and the number of channels that it has made.
  int64_t id = ((int64_t{rank_} + 1) << 32) + ++created_;
  group.broadcast(&id, sizeof id, 0);
  mine->group.fill('\0');
  group.name().copy(mine->group.data(), mine->group.size() - 1);
  mine->state = static_cast<int32_t>(ChannelState::idle);
  mine->count = 0;
  mine->ready = 0;
  mine->deadlock_found_by = 0;
  mine->started = 0;
  mine->ordered = mine->group[0] != '\0' && Mesh::is_link(mine->group.data()) ? 0 : 1;
  for (StartedBatches& other : mine->before) other.id = 0;
  mine->id.store(id, std::memory_order_release);
  return *mine;
}

TransferStatus::StartOrder TransferStatus::start(ChannelSlot& mine, const std::string& text) {
  StartOrder order;
  for (const ChannelSlot& other : slot(rank_).channels)
    if (&other != &mine && other.id.load() != 0 && other.ordered.load() != 0)
      order.emplace_back(other.id.load(), other.started.load());
  auto& kept = mine.texts[static_cast<size_t>(mine.started.load() + 1) % ChannelSlot::kKeptTexts];
  kept.fill('\0');
  text.copy(kept.data(), kept.size() - 1);
  ++mine.started;
  return order;
}

void TransferStatus::publish_order(ChannelSlot& mine, const StartOrder& order) {
  for (size_t i = 0; i < mine.before.size(); ++i) {
    mine.before[i].id = i < order.size() ? order[i].first : 0;
    mine.before[i].count = i < order.size() ? order[i].second : 0;
  }
}

std::string TransferStatus::batch_text(int rank, int64_t id, int64_t number) const {
  const ChannelSlot* const channel = find(rank, id);
  if (!channel) return "transfer batch " + std::to_string(number) + " of a group that has ended";
  std::string text = "transfer batch " + std::to_string(number) + " of group `" + channel->group.data() + "`";
  const int64_t last = channel->started.load();
  if (number > last - static_cast<int64_t>(ChannelSlot::kKeptTexts) && number <= last)
    text += " (" + std::string(channel->texts[static_cast<size_t>(number) % ChannelSlot::kKeptTexts].data()) +
            ")";
  return text;
}

std::optional<std::string> TransferStatus::different_order(const ChannelSlot& mine, int peer) const {
  const ChannelSlot* const theirs = find(peer, mine.id.load());
  if (!theirs || mine.ordered.load() == 0) return std::nullopt;
  for (const StartedBatches& here : mine.before) {
    const int64_t id = here.id.load();
    if (id == 0) break;
    const auto there =
        std::ranges::find_if(theirs->before, [&](const StartedBatches& b) { return b.id.load() == id; });
    if (there == theirs->before.end() || there->count.load() == here.count.load()) continue;
    const bool first_here = here.count.load() > there->count.load();
    const int before = first_here ? rank_ : peer, after = first_here ? peer : rank_;
    const int64_t number = std::min(here.count.load(), there->count.load()) + 1;
    return "ranks start the batches of two groups in different orders: rank " + std::to_string(before) +
           " starts " + batch_text(before, id, number) + " before " +
           batch_text(before, mine.id.load(), mine.batch.load()) + ", rank " + std::to_string(after) +
           " after it";
  }
  return std::nullopt;
}

void TransferStatus::compute_waits(int64_t id, int64_t batch) {
  slot(rank_).waits_for_batch.store(batch, std::memory_order_relaxed);
  slot(rank_).waits_for.store(id, std::memory_order_release);
}

ChannelSlot* TransferStatus::find(int rank, int64_t id) const {
  for (ChannelSlot& channel : slot(rank).channels)
    if (channel.id.load(std::memory_order_acquire) == id) return &channel;
  return nullptr;
}

// A path through ranks of which each waits for the next; a channel on it twice closes a cycle.
struct TransferStatus::Search {
  struct Step {
    int rank;
    int64_t id;
    std::string text;
  };
  std::vector<Step> path;
  // Index in `path` of the first step of the cycle.
  size_t cycle = 0;
};

bool TransferStatus::compute_blocked(Search& search, int rank) const {
  const int64_t id = slot(rank).waits_for.load(std::memory_order_acquire);
  if (id == 0) return false;
  const ChannelSlot* channel = find(rank, id);
  // A later batch: the one that was waited for has ended.
  if (!channel || channel->batch.load() > slot(rank).waits_for_batch.load()) return false;
  return blocked(search, rank, id);
}

bool TransferStatus::blocked(Search& search, int rank, int64_t id) const {
  const auto before = std::find_if(search.path.begin(), search.path.end(),
                                   [&](const Search::Step& s) { return s.rank == rank && s.id == id; });
  if (before != search.path.end()) {
    search.cycle = static_cast<size_t>(before - search.path.begin());
    return true;
  }
  const ChannelSlot* channel = find(rank, id);
  if (!channel) return false;
  const auto state = static_cast<ChannelState>(channel->state.load(std::memory_order_acquire));
  const std::string where = "rank " + std::to_string(rank) + ", group `" + channel->group.data() +
                            "`, batch " + std::to_string(channel->batch.load()) + ": ";
  if (state == ChannelState::idle) return false;
  if (state == ChannelState::waits_for_compute) {
    const auto is_ready = [&] { return channel->ready.load() >= channel->batch.load(); };
    if (is_ready()) return false;
    const auto depth = static_cast<std::ptrdiff_t>(search.path.size());
    search.path.push_back(
        {rank, id, where + "waits for the compute queue, which waits for an earlier transfer"});
    // The compute queue may have gone on meanwhile, and wait for this batch.
    if (compute_blocked(search, rank) && !is_ready()) return true;
    search.path.erase(search.path.begin() + depth, search.path.end());
    return false;
  }
  const auto transfers = [](const ChannelSlot& of) {
    return std::span(of.transfers).first(static_cast<size_t>(of.count.load(std::memory_order_acquire)));
  };
  for (const TransferSlot& transfer : transfers(*channel)) {
    if (transfer.matched.load() != 0) continue;
    const int peer = transfer.peer.load();
    const ChannelSlot* theirs = find(peer, id);
    if (!theirs) continue;
    // The peer is in a batch that meets this transfer.
    const bool meets = static_cast<ChannelState>(theirs->state.load()) == ChannelState::transfers &&
                       std::ranges::any_of(transfers(*theirs), [&](const TransferSlot& other) {
                         return other.peer.load() == rank && other.sends.load() != transfer.sends.load();
                       });
    if (meets) continue;
    search.path.push_back({rank, id,
                           where +
                               std::string(name_of(static_cast<TransferBatch::Kind>(transfer.kind.load()))) +
                               " of " + std::to_string(transfer.bytes.load()) + " bytes " +
                               (transfer.sends.load() ? "to" : "from") + " rank " + std::to_string(peer)});
    if (blocked(search, peer, id)) return true;
    search.path.pop_back();
  }
  return false;
}

std::optional<TransferStatus::Deadlock> TransferStatus::deadlock(const ChannelSlot& mine) const {
  Search search;
  if (!blocked(search, rank_, mine.id.load())) return std::nullopt;
  // The text begins with the lowest rank, so that all ranks of the cycle report the same text.
  auto& path = search.path;
  path.erase(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(search.cycle));
  std::rotate(
      path.begin(),
      std::ranges::min_element(path, {}, [](const Search::Step& s) { return std::pair(s.rank, s.id); }),
      path.end());
  Deadlock deadlock;
  for (const Search::Step& step : path) {
    deadlock.text += (deadlock.text.empty() ? "" : "; ") + step.text;
    deadlock.channels.emplace_back(step.rank, step.id);
  }
  return deadlock;
}

void TransferStatus::report(const Deadlock& deadlock) {
  auto& text = slot(rank_).deadlock;
  text.fill('\0');
  deadlock.text.copy(text.data(), text.size() - 1);
  for (const auto& [rank, id] : deadlock.channels) {
    int32_t none = 0;
    if (ChannelSlot* channel = find(rank, id))
      channel->deadlock_found_by.compare_exchange_strong(none, rank_ + 1);
  }
}

std::optional<std::string> TransferStatus::reported(const ChannelSlot& mine) const {
  const int32_t by = mine.deadlock_found_by.load();
  if (by == 0) return std::nullopt;
  return std::string(slot(by - 1).deadlock.data());
}

}  // namespace capstan::comm
