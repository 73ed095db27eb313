#include "train/trainer/memory_trace.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace capstan::train {

MemoryTrace::MemoryTrace(std::vector<parallel::PipelineAction> actions, const parallel::ShorterStep& part)
    : actions_(std::move(actions)), part_(part) {
  for (parallel::PipelineAction action : actions_) {
    action.micro_batch += static_cast<int32_t>(part_.group);
    const auto found = std::find(actions_.begin(), actions_.end(), action);
    next_actions_.push_back(found == actions_.end() ? -1 : found - actions_.begin());
  }
  begin_segment(-1, -1);
}

void MemoryTrace::begin_segment(int64_t step, int64_t action) {
  segments_.push_back({step, action, events_.size(), std::ssize(blocks_)});
}
void MemoryTrace::begin_step() {
  step_segments_.push_back(segments_.size());
}
void MemoryTrace::begin_action() {
  const auto step = static_cast<int64_t>(step_segments_.size()) - 1;
  begin_segment(step, static_cast<int64_t>(segments_.size() - step_segments_.back()));
}
void MemoryTrace::end_step() {
  CAPSTAN_ASSERT(segments_.size() - step_segments_.back() == actions_.size(),
                 "a recorded step with another number of actions");
  begin_segment(-1, -1);
}

void MemoryTrace::allocated(const std::byte* data, int64_t bytes, MemoryCategory category) {
  const auto block = std::ssize(blocks_);
  blocks_.push_back({segments_.size() - 1, bytes, category});
  events_.push_back({Kind::allocate, category, bytes, block});
  in_use_[data] = block;
}
void MemoryTrace::freed(const std::byte* data, int64_t bytes, MemoryCategory category) {
  const auto found = in_use_.find(data);
  events_.push_back({Kind::free, category, bytes, found->second});
  in_use_.erase(found);
}
void MemoryTrace::pinned(int64_t bytes, MemoryCategory category) {
  events_.push_back({Kind::pin, category, bytes, -1});
}

int64_t MemoryTrace::successor(int64_t block) const {
  const Block& b = blocks_[static_cast<size_t>(block)];
  const Segment& segment = segments_[b.segment];
  if (segment.step < 0) return -1;
  const int64_t next = next_actions_[static_cast<size_t>(segment.action)];
  if (next < 0) return -1;
  const size_t there = segment_of(segment.step, next);
  if (there >= segments_.size()) return -1;
  const int64_t found = segments_[there].first_block + block - segment.first_block;
  if (found >= std::ssize(blocks_)) return -1;
  const Block& f = blocks_[static_cast<size_t>(found)];
  return f.segment == there && f.bytes == b.bytes && f.category == b.category ? found : -1;
}

bool MemoryTrace::same_events(size_t segment, size_t before) const {
  const size_t begin = segments_[segment].first_event, count = end_of(segment) - begin,
               begin_before = segments_[before].first_event;
  if (end_of(before) - begin_before != count) return false;
  for (size_t i = 0; i < count; ++i) {
    const Event &a = events_[begin_before + i], &b = events_[begin + i];
    if (a.kind != b.kind || a.bytes != b.bytes || a.category != b.category) return false;
    if (a.kind == Kind::free && successor(a.block) != b.block) return false;
  }
  return true;
}

bool MemoryTrace::repeats() const {
  for (int64_t step = 0; step < std::ssize(step_segments_); ++step) {
    for (int64_t action = part_.begin; action < part_.begin + part_.length; ++action)
      if (!same_events(segment_of(step, action), segment_of(step, action - part_.length))) return false;
    const std::vector<Chain> all = chains(step);
    if (std::any_of(all.begin(), all.end(), [](const Chain& chain) { return chain.empty(); })) return false;
  }
  return true;
}

std::vector<MemoryTrace::Chain> MemoryTrace::chains(int64_t step) const {
  const size_t first = segment_of(step, part_.begin), end = first + static_cast<size_t>(part_.length);
  std::vector<Chain> result;
  for (size_t i = segments_[first].first_event; i < end_of(end - 1); ++i) {
    if (events_[i].kind != Kind::free) continue;
    Chain chain;
    int64_t block = events_[i].block;
    while (block >= 0 && blocks_[static_cast<size_t>(block)].segment < first) {
      chain.push_back(block);
      block = successor(block);
    }
    if (block < 0)
      chain.clear();
    else
      chain.push_back(block);
    result.push_back(std::move(chain));
  }
  return result;
}

void MemoryTrace::play(Device& device, const Event& event, std::byte*& address) {
  switch (event.kind) {
    case Kind::allocate:
      address = device.allocate(event.bytes, event.category);
      break;
    case Kind::free:
      device.free(address, event.bytes, event.category);
      break;
    case Kind::pin:
      // The meta device does not look at the address.
      event.bytes > 0 ? static_cast<void>(device.allocate_pinned(event.bytes, event.category))
                      : device.free_pinned(nullptr, -event.bytes, event.category);
      break;
  }
}

void MemoryTrace::play_repetitions(Device& device, int64_t step, std::vector<std::byte*>& addresses) const {
  const size_t first = segment_of(step, part_.begin), end = first + static_cast<size_t>(part_.length),
               begin_event = segments_[first].first_event, end_event = end_of(end - 1);
  const int64_t first_block = segments_[first].first_block, blocks = segments_[end].first_block - first_block;
  const std::vector<Chain> freed = chains(step);
  // The blocks that each repetition allocates.
  std::vector<std::byte*> repeated(static_cast<size_t>(part_.times * blocks));
  // Of a chain, what the micro-batches have in place of its first block after `later` periods.
  const auto after = [&](const Chain& chain, int64_t later) -> std::byte*& {
    const int64_t beyond = later - std::ssize(chain) + 1;
    if (beyond <= 0) return addresses[static_cast<size_t>(chain[static_cast<size_t>(later)])];
    return repeated[static_cast<size_t>((beyond - 1) * blocks + chain.back() - first_block)];
  };
  for (int64_t k = 1; k <= part_.times; ++k) {
    size_t frees = 0;
    for (size_t i = begin_event; i < end_event; ++i) {
      const Event& e = events_[i];
      const int64_t allocated = (k - 1) * blocks + e.block - first_block;
      if (e.kind == Kind::allocate) play(device, e, repeated[static_cast<size_t>(allocated)]);
      if (e.kind == Kind::free) play(device, e, after(freed[frees++], k));
    }
  }
  // The actions that follow are those of the last micro-batches.
  for (const Chain& chain : freed)
    for (int64_t i = 1; i < std::ssize(chain); ++i)
      addresses[static_cast<size_t>(chain[static_cast<size_t>(i)])] = after(chain, i + part_.times);
}

void MemoryTrace::replay(Device& device) const {
  std::vector<std::byte*> addresses(blocks_.size());
  for (size_t segment = 0; segment < segments_.size(); ++segment) {
    const Segment& s = segments_[segment];
    if (s.step >= 0 && s.action == part_.begin + part_.length) play_repetitions(device, s.step, addresses);
    std::byte* none = nullptr;
    for (size_t i = s.first_event; i < end_of(segment); ++i) {
      const Event& e = events_[i];
      play(device, e, e.kind == Kind::pin ? none : addresses[static_cast<size_t>(e.block)]);
    }
  }
}

}  // namespace capstan::train
