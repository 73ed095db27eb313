#include "kernels/simulated/block.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/simulated/overflow.hpp"
#include "kernels/simulated/sample.hpp"

namespace capstan::kernels::simulated {

constinit thread_local Block* running_block = nullptr;

uint64_t next_random(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

namespace {

template <class T>
void shuffle(T* values, int64_t count, uint64_t seed) {
  for (int64_t i = count - 1; i > 0; --i)
    std::swap(values[i], values[next_random(seed) % static_cast<uint64_t>(i + 1)]);
}
std::string hexadecimal(uint32_t mask) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[mask >> shift & 15];
  return text;
}
int lowest_lane(uint32_t mask) {
  return __builtin_ctz(mask);
}
// Ends a block of a sample that has waited often enough.
struct BlockEnded {};
}  // namespace

std::string Location::text() const {
  return std::string(file) + ":" + std::to_string(line);
}

// ---- running

Block::Block() = default;
Block::~Block() = default;

void Block::prepare(const Order& order) {
  if (ordered_threads_ != launch_.threads || order.kind != ordered_kind_ ||
      order.kind == Order::Kind::random) {
    for (int i = 0; i < launch_.threads; ++i)
      order_[static_cast<size_t>(i)] =
          static_cast<int16_t>(order.kind == Order::Kind::reverse ? launch_.threads - 1 - i : i);
    if (order.kind == Order::Kind::random)
      shuffle(order_.data(), launch_.threads,
              order.seed * 0x2545F4914F6CDD1D + static_cast<uint64_t>(index_));
    ordered_threads_ = launch_.threads;
    ordered_kind_ = order.kind;
  }
  queue_begin_ = queue_end_ = 0;
  for (int i = 0; i < launch_.threads; ++i) push(order_[static_cast<size_t>(i)]);
  std::fill_n(states_.begin(), launch_.threads, State::fresh);
  std::fill_n(committed_.begin(), launch_.threads, 0);
  for (int i = 0; i < launch_.threads; ++i) copies_[static_cast<size_t>(i)].clear();
  returned_ = at_barrier_ = 0;
  epoch_ = 0;
  const auto warps = static_cast<size_t>(launch_.threads / kWarp);
  if (warps_.size() < warps) warps_.resize(warps);
  for (size_t i = 0; i < warps; ++i) {
    warps_[i].pending.clear();
    warps_[i].returned = warps_[i].epoch = 0;
  }
  error_ = nullptr;
  memory_.begin_block(launch_.shared_bytes);
}

void Block::run(int64_t index, const LaunchShape& launch, const Order& order, int64_t most_waits,
                FunctionRef<void()> kernel) {
  index_ = index;
  launch_ = launch;
  most_waits_ = most_waits;
  waits_ = 0;
  kernel_ = &kernel;
  prepare(order);
  Block* const outer = std::exchange(running_block, this);
  thread_ = pop();
  running_fiber_ = &take_fiber();
  main_.switch_to(*running_fiber_);
  running_block = outer;
  if (error_) {
    // The other threads do not continue: every fiber begins again in the next block.
    free_fibers_.clear();
    for (const auto& fiber : fibers_) {
      fiber->restart();
      free_fibers_.push_back(fiber.get());
    }
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
  free_fibers_.push_back(running_fiber_);
  memory_.end_block();
  throw_overflow();
}

Fiber& Block::take_fiber() {
  if (free_fibers_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>(run_threads, this));
    return *fibers_.back();
  }
  Fiber& fiber = *free_fibers_.back();
  free_fibers_.pop_back();
  return fiber;
}

// Entry function of every fiber. Runs one thread of the block after another, and switches to the fiber of a
// suspended thread when that thread is the next in the order.
void Block::run_threads(void* argument) {
  Block& block = *static_cast<Block*>(argument);
  for (;;) {
    block.run_thread();
    int next = block.error_ ? -1 : block.pop();
    if (next < 0 && !block.error_ && block.returned_ < block.launch_.threads) {
      try {
        block.report_stuck();
      } catch (...) {
        block.error_ = std::current_exception();
      }
    }
    Fiber& self = *block.running_fiber_;
    if (next < 0) {
      self.switch_to(block.main_);
    } else if (block.states_[static_cast<size_t>(next)] == State::fresh) {
      block.thread_ = next;
    } else {
      block.free_fibers_.push_back(&self);
      block.thread_ = next;
      block.running_fiber_ = block.fiber_of_[static_cast<size_t>(next)];
      self.switch_to(*block.running_fiber_);
    }
  }
}

void Block::run_thread() {
  states_[static_cast<size_t>(thread_)] = State::running;
  // An exception cannot leave the stack of its fiber. run() throws it again on the stack of the host thread.
  try {
    (*kernel_)();
    finish_thread();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Block::finish_thread() {
  for (const Copy& copy : copies_[static_cast<size_t>(thread_)])
    report(copy.at, name_of(thread_) + " returns without waiting for this asynchronous copy");
  states_[static_cast<size_t>(thread_)] = State::returned;
  ++returned_;
  if (at_barrier_ > 0) check_return();
  Warp& warp = warps_[static_cast<size_t>(thread_ / kWarp)];
  const int lane = thread_ % kWarp;
  warp.returned |= uint32_t{1} << lane;
  for (const WarpOperation& operation : warp.pending)
    if ((operation.mask >> lane & 1) != 0)
      report(operation.at, "this warp operation waits for " + name_of(thread_) +
                               ", which its mask names and which has returned");
}

void Block::check_return() const {
  for (int other = 0; other < launch_.threads; ++other)
    if (states_[static_cast<size_t>(other)] == State::at_barrier) {
      int gone = 0;
      while (states_[static_cast<size_t>(gone)] != State::returned) ++gone;
      report(waits_at_[static_cast<size_t>(other)], "barrier divergence: " + name_of(other) +
                                                        " waits at this barrier, and thread " +
                                                        std::to_string(gone) + " has returned");
    }
}

void Block::suspend(State state, Location at) {
  if (++waits_ > most_waits_) throw BlockEnded();
  const auto self = static_cast<size_t>(thread_);
  states_[self] = state;
  waits_at_[self] = at;
  const int next = pop();
  if (next < 0) report_stuck();
  if (next == thread_) {
    states_[self] = State::running;
    return;
  }
  Fiber& fiber = *running_fiber_;
  fiber_of_[self] = &fiber;
  switch_to(next);
  states_[self] = State::running;
}

void Block::switch_to(int next) {
  Fiber& from = *running_fiber_;
  const auto to = static_cast<size_t>(next);
  running_fiber_ = states_[to] == State::fresh ? &take_fiber() : fiber_of_[to];
  thread_ = next;
  from.switch_to(*running_fiber_);
}

void Block::report_stuck() const {
  for (int i = 0; i < launch_.threads; ++i) {
    const auto at = static_cast<size_t>(i);
    if (states_[at] != State::in_warp) continue;
    const Warp& warp = warps_[static_cast<size_t>(i / kWarp)];
    for (const WarpOperation& operation : warp.pending) {
      const uint32_t missing = operation.mask & ~operation.arrived;
      if ((operation.arrived >> i % kWarp & 1) == 0 || missing == 0) continue;
      const int other = i / kWarp * kWarp + lowest_lane(missing);
      report(operation.at, "this warp operation with the mask " + hexadecimal(operation.mask) +
                               " waits for " + name_of(other) + ", which waits at " +
                               waits_at_[static_cast<size_t>(other)].text());
    }
  }
  report(barrier_, "this barrier is not reached by all threads of block " + std::to_string(index_));
}

// ---- barriers and warps

void Block::synchronize(Location at) {
  if (at_barrier_ > 0 && !(barrier_ == at)) {
    int other = 0;
    while (states_[static_cast<size_t>(other)] != State::at_barrier) ++other;
    report(at, "barrier divergence: " + name_of(thread_) + " reaches this barrier, and thread " +
                   std::to_string(other) + " waits at another one, " + barrier_.text());
  }
  barrier_ = at;
  ++at_barrier_;
  if (returned_ > 0) {
    states_[static_cast<size_t>(thread_)] = State::at_barrier;
    waits_at_[static_cast<size_t>(thread_)] = at;
    check_return();
  }
  // The last thread waits as well, so that all continue in the order of the block.
  if (at_barrier_ == launch_.threads) {
    at_barrier_ = 0;
    ++epoch_;
    for (int i = 0; i < launch_.threads; ++i) push(order_[static_cast<size_t>(i)]);
    suspend(State::ready, at);
    return;
  }
  suspend(State::at_barrier, at);
}

bool Block::arrive(Location at, uint32_t mask) {
  const int first = thread_ / kWarp * kWarp, lane = thread_ - first;
  Warp& warp = warps_[static_cast<size_t>(thread_ / kWarp)];
  const uint32_t self = uint32_t{1} << lane;
  if ((mask & self) == 0)
    report(at, "the mask " + hexadecimal(mask) + " of this warp operation does not name lane " +
                   std::to_string(lane) + ", which executes it (" + name_of(thread_) + ")");
  if (const uint32_t gone = mask & warp.returned; gone != 0)
    report(at, "the mask " + hexadecimal(mask) + " of this warp operation names " +
                   name_of(first + lowest_lane(gone)) + ", which has returned");
  for (size_t i = 0; i < warp.pending.size(); ++i) {
    WarpOperation& operation = warp.pending[i];
    if ((operation.mask & mask) == 0) continue;
    if (operation.mask != mask || !(operation.at == at))
      report(at, name_of(thread_) + " executes this warp operation with the mask " + hexadecimal(mask) +
                     ", and " + name_of(first + lowest_lane(operation.arrived)) +
                     " another one with the mask " + hexadecimal(operation.mask) + " at " +
                     operation.at.text());
    operation.arrived |= self;
    if (operation.arrived != mask) {
      suspend(State::in_warp, at);
      return false;
    }
    warp.pending.erase(warp.pending.begin() + static_cast<std::ptrdiff_t>(i));
    release_warp(thread_ / kWarp, mask & ~self);
    return true;
  }
  if (mask == self) return true;
  warp.pending.push_back({at, mask, self});
  suspend(State::in_warp, at);
  return false;
}

void Block::release_warp(int warp, uint32_t lanes) {
  const bool reverse = ordered_kind_ == Order::Kind::reverse;
  // Odd factors permute the lanes of a random order.
  const int factor = ordered_kind_ == Order::Kind::random ? order_[0] | 1 : 1;
  for (int i = 0; i < kWarp; ++i) {
    const int lane = (reverse ? kWarp - 1 - i : i * factor) & (kWarp - 1);
    if ((lanes >> lane & 1) == 0) continue;
    const int thread = warp * kWarp + lane;
    states_[static_cast<size_t>(thread)] = State::ready;
    push(thread);
  }
}

void Block::synchronize_warp(Location at, uint32_t mask) {
  if (arrive(at, mask) && mask == kAllLanes) ++warps_[static_cast<size_t>(thread_ / kWarp)].epoch;
}

// ---- shared memory

SharedArray& Block::shared(const SharedSite& site, int64_t count, size_t element_bytes, bool dynamic) {
  SharedArray& array = memory_.array(site, count, element_bytes, dynamic);
  if (array.count != count)
    report(site.at, "threads of one block declare " + std::string(site.name) + " with " +
                        std::to_string(array.count) + " and with " + std::to_string(count) + " elements");
  return array;
}

SharedArray& Block::dynamic_shared(const SharedSite& site, size_t element_bytes) {
  return shared(site, static_cast<int64_t>(launch_.shared_bytes / element_bytes), element_bytes, true);
}

SharedElement& Block::accessed(SharedArray& array, int64_t i, Location at, const char* accesses) const {
  const auto text = [&] {
    return name_of(thread_) + " " + accesses + " " + array.site->name + "[" + std::to_string(i) + "]";
  };
  if (i < 0 || i >= array.count) [[unlikely]]
    report(at, text() + ", which has " + std::to_string(array.count) + " elements");
  SharedElement& element = array.elements[static_cast<size_t>(i)];
  if (element.copying) [[unlikely]]
    report(at,
           text() + " before the asynchronous copy at " + element.write.at.text() + " has been waited for");
  return element;
}

void Block::read(SharedArray& array, int64_t i, Location at) {
  SharedElement& element = accessed(array, i, at, "reads");
  const SharedAccess& write = element.write;
  if (write.thread >= 0 && write.thread != thread_ && !ordered(write.thread, write.epoch, write.warp_epoch))
    report_race(array, i, at, false, write, true);
  SharedAccess& read = element.read;
  const uint32_t warp_epoch = warps_[static_cast<size_t>(thread_ / kWarp)].epoch;
  const auto lanes = static_cast<int16_t>(SharedAccess::kLanes + thread_ / kWarp);
  if (read.thread == SharedAccess::kNone || read.epoch != epoch_)
    read.thread = static_cast<int16_t>(thread_);
  else if (read.thread != thread_ && read.thread != lanes)
    read.thread =
        read.thread >= 0 && read.thread < SharedAccess::kLanes && read.thread / kWarp == thread_ / kWarp
            ? lanes
            : SharedAccess::kSeveral;
  read.epoch = epoch_;
  read.warp_epoch = warp_epoch;
  read.at = at;
}

void Block::write(SharedArray& array, int64_t i, Location at) {
  SharedElement& element = accessed(array, i, at, "writes");
  SharedAccess& write = element.write;
  const SharedAccess& read = element.read;
  if (write.thread >= 0 && write.thread != thread_ && !ordered(write.thread, write.epoch, write.warp_epoch))
    report_race(array, i, at, true, write, true);
  if (read.thread != SharedAccess::kNone && read.thread != thread_ && read.epoch == epoch_) {
    const int reader =
        read.thread >= SharedAccess::kLanes ? (read.thread - SharedAccess::kLanes) * kWarp : read.thread;
    if (reader < 0 || !ordered(reader, read.epoch, read.warp_epoch))
      report_race(array, i, at, true, read, false);
  }
  write.thread = static_cast<int16_t>(thread_);
  write.epoch = epoch_;
  write.warp_epoch = warps_[static_cast<size_t>(thread_ / kWarp)].epoch;
  write.at = at;
}

void Block::start_copy(SharedArray& array, int64_t first, const void* from, size_t bytes, int given,
                       Location at) {
  const auto count = static_cast<int64_t>(bytes / array.element_bytes);
  if (given < 0 || static_cast<size_t>(given) > bytes)
    report(at,
           "an asynchronous copy of " + std::to_string(given) + " of " + std::to_string(bytes) + " bytes");
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0 ||
      static_cast<size_t>(first) * array.element_bytes % bytes != 0)
    report(at, "an asynchronous copy of " + std::to_string(bytes) + " bytes is not aligned to its size");
  for (int64_t i = first; i < first + count; ++i) {
    write(array, i, at);
    array.elements[static_cast<size_t>(i)].copying = true;
  }
  std::memset(array.data + static_cast<size_t>(first) * array.element_bytes, 0xFF, bytes);
  const auto self = static_cast<size_t>(thread_);
  copies_[self].push_back({&array, first, from, bytes, static_cast<size_t>(given), at, committed_[self]});
}

void Block::wait_for_copies(int pending) {
  const int done = committed_[static_cast<size_t>(thread_)] - pending;
  std::vector<Copy>& mine = copies_[static_cast<size_t>(thread_)];
  const auto ends = [&](const Copy& copy) { return copy.group < done; };
  for (const Copy& copy : mine) {
    if (!ends(copy)) continue;
    std::byte* const to = copy.array->data + static_cast<size_t>(copy.first) * copy.array->element_bytes;
    std::memcpy(to, copy.from, copy.given);
    std::memset(to + copy.given, 0, copy.bytes - copy.given);
    const auto count = static_cast<int64_t>(copy.bytes / copy.array->element_bytes);
    for (int64_t i = copy.first; i < copy.first + count; ++i) {
      copy.array->elements[static_cast<size_t>(i)].copying = false;
      write(*copy.array, i, copy.at);
    }
  }
  std::erase_if(mine, ends);
}

void read_shared(SharedArray& array, Index i) {
  running_block->read(array, i.value, i.at);
}
void write_shared(SharedArray& array, Index i) {
  running_block->write(array, i.value, i.at);
}

// ---- reports

std::string Block::name_of(int thread) const {
  return "thread " + std::to_string(thread) + " of block " + std::to_string(index_);
}

void Block::report(Location at, const std::string& what) const {
  fail(ErrorCode::internal, at.text() + ": " + what);
}

void Block::report_race(const SharedArray& array, int64_t i, Location at, bool writes,
                        const SharedAccess& other, bool other_writes) const {
  const std::string who = other.thread >= 0 && other.thread < SharedAccess::kLanes
                              ? "thread " + std::to_string(other.thread)
                              : std::string("other threads");
  report(at, "no barrier between two accesses of " + std::string(array.site->name) + "[" + std::to_string(i) +
                 "]: " + name_of(thread_) + (writes ? " writes it here, " : " reads it here, ") + who +
                 (other_writes ? " wrote it at " : " read it at ") + other.at.text());
}

// ---- blocks of a launch

namespace {
std::mutex order_mutex;
Order current_order;
}  // namespace

void set_order(Order wanted) {
  const std::lock_guard lock(order_mutex);
  current_order = wanted;
}
Order order() {
  const std::lock_guard lock(order_mutex);
  return current_order;
}

namespace {
void check_launch(const LaunchShape& launch) {
  const auto refuse = [&](const std::string& what) {
    fail(ErrorCode::internal, launch.at.text() + ": " + what);
  };
  if (launch.threads <= 0 || launch.threads > kMaxThreads || launch.threads % kWarp != 0)
    refuse("a block has " + std::to_string(launch.threads) +
           " threads, and a GPU runs complete warps of 32, " + std::to_string(kMaxThreads) +
           " threads at most");
  if (launch.blocks < 0 || launch.blocks > kMaxBlocks)
    refuse("a launch has " + std::to_string(launch.blocks) + " blocks, and a GPU runs " +
           std::to_string(kMaxBlocks) + " at most");
  if (launch.shared_bytes > most_shared_bytes())
    refuse("a launch has " + std::to_string(launch.shared_bytes) +
           " bytes of shared memory for each block, and a GPU allows " + std::to_string(most_shared_bytes()));
}

void run_sampled_blocks(const Sample& sample, const LaunchShape& launch, FunctionRef<void()> kernel) {
  thread_local Block block;
  for (const int64_t i : sampled_blocks(sample, launch.blocks, launch.threads)) {
    try {
      block.run(i, launch, order(), sample.waits, kernel);
    } catch (const BlockEnded&) {
    }
  }
}
}  // namespace

std::string running_launch_text() {
  if (!running_block) return "";
  return running_block->launch().at.text() + ": block " + std::to_string(running_block->index()) + " of " +
         std::to_string(running_block->blocks());
}

void run_blocks(ThreadPool* pool, const LaunchShape& launch, FunctionRef<void()> kernel) {
  check_launch(launch);
  if (const Sample* const sample = current_sample()) return run_sampled_blocks(*sample, launch, kernel);
  const Order order_now = order();
  std::vector<int32_t> shuffled;
  if (order_now.kind == Order::Kind::random) {
    shuffled.resize(static_cast<size_t>(launch.blocks));
    std::iota(shuffled.begin(), shuffled.end(), 0);
    shuffle(shuffled.data(), launch.blocks, order_now.seed);
  }
  const auto block_at = [&](int64_t i) -> int64_t {
    if (order_now.kind == Order::Kind::forward) return i;
    return order_now.kind == Order::Kind::reverse ? launch.blocks - 1 - i : shuffled[static_cast<size_t>(i)];
  };
  const auto run = [&](int64_t begin, int64_t end) {
    thread_local Block block;
    for (int64_t i = begin; i < end; ++i) block.run(block_at(i), launch, order_now, INT64_MAX, kernel);
  };
  // CUDA threads per tile of the thread pool; for fewer, waking a host thread costs more than it saves.
  constexpr int64_t kTileThreads = 8192;
  const int64_t tile = std::max<int64_t>(1, kTileThreads / launch.threads),
                tiles = ceil_div(launch.blocks, tile);
  if (!pool || tiles <= 1) return run(0, launch.blocks);
  pool->parallel_for(tiles, [&](int64_t i, int) { run(i * tile, std::min(launch.blocks, (i + 1) * tile)); });
}

}  // namespace capstan::kernels::simulated
