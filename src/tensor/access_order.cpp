#include "tensor/access_order.hpp"

#include <algorithm>
#include <utility>

#include "base/division.hpp"

namespace capstan {

namespace {

// Whether a byte of [begin, end) is in a row.
bool reaches(const ByteRows& rows, const std::byte* begin, const std::byte* end) {
  if (end <= rows.begin || rows.end() <= begin) return false;
  if (rows.rows == 1) return true;
  // The first row that ends after `begin`.
  const int64_t before = begin - rows.begin - rows.row_bytes;
  const int64_t first = before < 0 ? 0 : before / rows.stride + 1;
  return first < rows.rows && rows.row(first) < end;
}

}  // namespace

bool overlap(const ByteRows& a, const ByteRows& b) {
  if (a.end() <= b.begin || b.end() <= a.begin) return false;
  const ByteRows &few = a.rows <= b.rows ? a : b, &many = a.rows <= b.rows ? b : a;
  if (few.rows == 1 || few.stride != many.stride) {
    for (int64_t i = 0; i < few.rows; ++i)
      if (reaches(many, few.row(i), few.row(i) + few.row_bytes)) return true;
    return false;
  }
  // Row i of b begins `phase` bytes after row i + shift of a.
  const int64_t distance = b.begin - a.begin;
  const int64_t shift = distance >= 0 ? distance / a.stride : -ceil_div(-distance, a.stride);
  const int64_t phase = distance - shift * a.stride;
  const auto both_exist = [&](int64_t later) { return later < a.rows && later + b.rows > 0; };
  return (phase < a.row_bytes && both_exist(shift)) ||
         (phase + b.row_bytes > a.stride && both_exist(shift + 1));
}

bool covers(const ByteRows& outer, const ByteRows& inner) {
  if (inner.begin < outer.begin || outer.end() < inner.end()) return false;
  if (outer.rows == 1) return true;
  const int64_t phase = (inner.begin - outer.begin) % outer.stride;
  return phase + inner.row_bytes <= outer.row_bytes && (inner.rows == 1 || inner.stride == outer.stride);
}

void AccessOrder::join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

AccessOrder::Clock& AccessOrder::clock_of(Queue queue) {
  const auto index = static_cast<size_t>(queue);
  if (clocks_.size() <= index) clocks_.resize(index + 1);
  Clock& clock = clocks_[index];
  if (clock.size() <= index) clock.resize(index + 1);
  join(clock, host_);
  return clock;
}

void AccessOrder::wait(Queue queue, const Clock& event) {
  join(clock_of(queue), event);
}

void AccessOrder::wait_on_host(const Clock& event) {
  join(host_, event);
}

void AccessOrder::wait_for_all() {
  for (const Clock& clock : clocks_) join(host_, clock);
}

void AccessOrder::add_block(std::byte* data, int64_t bytes) {
  Block& block = blocks_[data];
  block = {bytes, {}, {}};
  constexpr auto kCompute = static_cast<size_t>(Queue::compute);
  block.accesses.push_back(
      {kCompute, ++clock_of(Queue::compute)[kCompute], true, {data, bytes}, "its allocation"});
}

std::optional<std::string> AccessOrder::remove_block(std::byte* data) {
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return std::nullopt;
  auto missing = access(Queue::compute, {data, found->second.bytes}, true, "its release");
  blocks_.erase(found);
  return missing;
}

AccessOrder::Block& AccessOrder::block_of(const ByteRows& memory) {
  auto found = blocks_.upper_bound(memory.begin);
  if (found == blocks_.begin()) return ordinary_;
  --found;
  return memory.end() <= found->first + found->second.bytes ? found->second : ordinary_;
}

std::optional<AccessOrder::MissingHostWait> AccessOrder::host_access(const ByteRows& memory, HostUse use) {
  if (memory.bytes() <= 0) return std::nullopt;
  const Block& block = block_of(memory);
  for (const Access& earlier : block.accesses) {
    if (earlier.number <= at(host_, earlier.queue) || (use == HostUse::reads && !earlier.writes)) continue;
    if (!overlap(earlier.memory, memory)) continue;
    const char* const action = use == HostUse::reads    ? "reads "
                               : use == HostUse::writes ? "writes "
                                                        : "releases ";
    return MissingHostWait{static_cast<Queue>(earlier.queue),
                           "the host " + std::string(action) + std::to_string(memory.bytes()) + " bytes " +
                               (block.name.empty() ? "" : "of " + block.name + " ") + "that " + earlier.by +
                               (earlier.writes ? " writes" : " reads") + ", and does not wait for it"};
  }
  return std::nullopt;
}

std::optional<AccessOrder::MissingHostWait> AccessOrder::remove_host_block(std::byte* data) {
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return std::nullopt;
  auto missing = host_access({data, found->second.bytes}, HostUse::releases);
  blocks_.erase(found);
  return missing;
}

std::optional<std::string> AccessOrder::access(Queue queue, const ByteRows& memory, bool writes,
                                               const std::string& by) {
  if (memory.bytes() <= 0) return std::nullopt;
  Clock& clock = clock_of(queue);
  const auto index = static_cast<size_t>(queue);
  return add(block_of(memory), {index, ++clock[index], writes, memory, by});
}

std::optional<std::string> AccessOrder::add(Block& block, Access access) {
  const Clock& clock = clocks_[access.queue];
  std::optional<std::string> missing;
  const auto is_replaced = [&](const Access& earlier) {
    if (earlier.number <= at(host_, earlier.queue)) return true;
    const bool ordered = earlier.queue == access.queue || earlier.number <= at(clock, earlier.queue);
    if (!ordered && !missing && (earlier.writes || access.writes) && overlap(earlier.memory, access.memory))
      missing = access.by + " " + (access.writes ? "writes " : "reads ") +
                std::to_string(access.memory.bytes()) + " bytes that " + earlier.by + " " +
                (earlier.writes ? "writes" : "reads") + ", and does not wait for it";
    // Work that waits for the new access then waits for the earlier one.
    return ordered && (access.writes || !earlier.writes) && covers(access.memory, earlier.memory);
  };
  std::erase_if(block.accesses, is_replaced);
  block.accesses.push_back(std::move(access));
  return missing;
}

}  // namespace capstan
