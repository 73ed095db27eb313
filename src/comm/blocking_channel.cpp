#include "comm/blocking_channel.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "comm/shared_memory.hpp"

namespace capstan::comm {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kChunk = int64_t{32} << 10;  // bytes

// What one rank sends to another: at most one chunk at a time.
struct alignas(64) Mailbox {
  // Messages that the sender and the receiver have come to, and what they say about the last one.
  std::atomic<int64_t> sends, receives;
  std::atomic<int64_t> sender_says, receiver_says;
  // Chunks written and read so far.
  std::atomic<int64_t> written, read;
  std::array<std::byte, kChunk> data;
};
// Of a channel; behind it the mailboxes [from][to].
struct alignas(64) Header {
  // 0: no failure; 1: one is being written; 2: `text` is complete.
  std::atomic<int32_t> failed;
  std::array<char, 2048> text;
};

int64_t say(Batch::Kind kind, int64_t bytes) {
  return bytes * 4 + static_cast<int64_t>(kind);
}
std::string said(int64_t what) {
  return std::string(name_of(static_cast<Batch::Kind>(what % 4))) + " of " + std::to_string(what / 4) +
         " bytes";
}

// A transfer between two ranks.
struct Part {
  Batch::Kind kind;
  bool sends;
  int peer;
  std::byte* data;
  int64_t bytes;
  int64_t done = 0;
  int64_t number = 0;
  bool matched = false, finished = false;
  std::vector<std::byte> arrived;
};

class BlockingChannel final : public Channel {
 public:
  BlockingChannel(Communicator& group, Device& device, std::shared_ptr<TransferStatus> status)
      : Channel(group),
        rank_(group.rank()),
        size_(group.size()),
        name_(group.name()),
        device_(device),
        status_(std::move(status)),
        slot_(status_->add(group)),
        ranks_(TransferStatus::world_ranks(group, status_->rank())),
        memory_(group, sizeof(Header) + sizeof(Mailbox) * ranks_.size() * ranks_.size()),
        sends_(ranks_.size()),
        receives_(ranks_.size()) {}
  ~BlockingChannel() override {
    // Batches use the members. An error is reported where the host waits for the device.
    try {
      if (queues_) device_.record(queues_->deliver)->wait();
    } catch (...) {
    }
    slot_.id.store(0);
  }

 protected:
  std::unique_ptr<Completion> begin(const Batch& batch, Queue after) override {
    CAPSTAN_ASSERT(&batch.device() == &device_, "a channel of another device");
    if (!queues_)
      queues_ = {.transfer = device_.add_queue(true, "transfers of `" + name_ + "`"),
                 .deliver = device_.add_queue(false, "delivery of `" + name_ + "`")};
    const auto ready = device_.record(after);
    const int64_t number = ++started_;
    const auto parts = std::make_shared<std::vector<Part>>(parts_of(batch));
    for (const Part& part : *parts)
      if (part.sends && part.peer != rank_) sent_ += part.bytes;
    device_.enqueue(queues_->transfer, [this, number] { publish(ChannelState::waits_for_compute, number); });
    device_.wait_for(queues_->transfer, *ready);
    QueueScope traced(device_, queues_->transfer);
    device_.enqueue(queues_->transfer, [this, number, parts] { run(number, *parts); });
    traced.end(text_of(batch));
    // What has arrived is seen late: kernels that do not wait for it read old values.
    device_.wait_for(queues_->deliver, *device_.record(queues_->transfer));
    device_.enqueue(queues_->deliver, [parts] {
      for (const Part& part : *parts)
        if (!part.sends) std::ranges::copy(part.arrived, part.data);
    });
    return std::make_unique<Queued>(*this, number);
  }

 private:
  class Queued final : public Completion {
   public:
    Queued(BlockingChannel& channel, int64_t number)
        : channel_(channel), number_(number), done_(channel.device_.record(channel.queues_->deliver)) {}
    void wait(Queue queue) override {
      Device& device = channel_.device_;
      const auto publish = [&](int64_t id) {
        if (queue != Queue::compute) return;
        device.enqueue(
            queue, [status = channel_.status_, id, number = number_] { status->compute_waits(id, number); });
      };
      publish(channel_.slot_.id.load());
      device.wait_for(queue, *done_);
      publish(0);
    }

   private:
    BlockingChannel& channel_;
    int64_t number_;
    std::unique_ptr<Event> done_;
  };

  Header& header() const { return *reinterpret_cast<Header*>(memory_.data()); }
  Mailbox& mailbox(int from, int to) const {
    auto* first = reinterpret_cast<Mailbox*>(memory_.data() + sizeof(Header));
    return first[from * size_ + to];
  }
  Mailbox& mailbox(const Part& part) const {
    return part.sends ? mailbox(rank_, part.peer) : mailbox(part.peer, rank_);
  }

  // A collective is a transfer with each other rank and a copy of this rank's own part, which is one of a
  // rank with itself.
  std::vector<Part> parts_of(const Batch& batch) {
    std::vector<Part> parts;
    const auto add = [&](Batch::Kind kind, bool sends, int peer, const Tensor& tensor, int64_t at,
                         int64_t bytes) {
      if (bytes > 0)
        parts.push_back({kind, sends, peer, device_.kernel_address(tensor.address()) + at, bytes});
    };
    for (const Batch::Transfer& t : batch.transfers()) {
      if (t.kind == Batch::Kind::send) add(t.kind, true, t.peer, t.from, 0, t.from.bytes());
      if (t.kind == Batch::Kind::receive) add(t.kind, false, t.peer, t.to, 0, t.to.bytes());
      if (t.peer >= 0) continue;
      const int64_t bytes = t.to.bytes() / size_;
      // Every rank begins with another peer. Its own part is the first.
      for (int shift = 0; shift < size_; ++shift) {
        const int peer = (rank_ + shift) % size_;
        add(t.kind, true, peer, t.from, t.kind == Batch::Kind::all_gather ? 0 : peer * bytes, bytes);
        add(t.kind, false, peer, t.to, peer * bytes, bytes);
      }
    }
    return parts;
  }

  void publish(ChannelState state, int64_t number) {
    slot_.batch.store(number);
    slot_.state.store(static_cast<int32_t>(state), std::memory_order_release);
  }
  void publish(const std::vector<Part>& parts, int64_t number) {
    const size_t count = std::min(parts.size(), ChannelSlot::kTransfers);
    for (size_t i = 0; i < count; ++i) {
      TransferSlot& to = slot_.transfers[i];
      to.kind = static_cast<int32_t>(parts[i].kind);
      to.peer = ranks_[static_cast<size_t>(parts[i].peer)];
      to.sends = parts[i].sends ? 1 : 0;
      to.matched = 0;
      to.bytes = parts[i].bytes;
    }
    slot_.count.store(static_cast<int32_t>(count), std::memory_order_release);
    publish(ChannelState::transfers, number);
  }

  // On the channel's queue.
  void run(int64_t number, std::vector<Part>& parts) {
    copy_own(parts);
    for (Part& part : parts) {
      auto& count = part.sends ? sends_ : receives_;
      part.number = ++count[static_cast<size_t>(part.peer)];
    }
    publish(parts, number);
    Patience patience;
    for (size_t open = parts.size(); open > 0;) {
      bool progress = false;
      open = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        if (!parts[i].finished) progress |= advance(parts, i);
        open += parts[i].finished ? 0 : 1;
      }
      if (progress)
        patience = {};
      else
        wait(patience);
    }
    publish(ChannelState::idle, number);
  }
  void copy_own(std::vector<Part>& parts) {
    const Part* from = nullptr;
    for (const Part& part : parts) {
      if (part.peer != rank_) continue;
      if (part.sends)
        from = &part;
      else if (from->data != part.data)
        std::memcpy(part.data, from->data, static_cast<size_t>(part.bytes));
    }
    std::erase_if(parts, [&](const Part& part) { return part.peer == rank_; });
    for (Part& part : parts)
      if (!part.sends) part.arrived.resize(static_cast<size_t>(part.bytes));
  }

  // One step of a part. Messages between two ranks are numbered: the next one of a batch begins after this
  // one.
  bool advance(std::vector<Part>& parts, size_t index) {
    Part& part = parts[index];
    Mailbox& box = mailbox(part);
    auto& mine = part.sends ? box.sends : box.receives;
    const auto& theirs = part.sends ? box.receives : box.sends;
    if (mine.load() < part.number) {
      for (size_t i = 0; i < index; ++i)
        if (parts[i].peer == part.peer && parts[i].sends == part.sends && !parts[i].finished) return false;
      // A receive and its send say the same.
      const Batch::Kind kind = part.kind == Batch::Kind::receive ? Batch::Kind::send : part.kind;
      (part.sends ? box.sender_says : box.receiver_says).store(say(kind, part.bytes));
      mine.store(part.number);
      return true;
    }
    if (!part.matched) {
      if (theirs.load() < part.number) return false;
      const int64_t sender = box.sender_says.load(), receiver = box.receiver_says.load();
      if (sender != receiver) fail_match(part, sender, receiver);
      part.matched = true;
      if (index < ChannelSlot::kTransfers) slot_.transfers[index].matched = 1;
      return true;
    }
    const int64_t size = std::min(kChunk, part.bytes - part.done);
    const int64_t written = box.written.load(), read = box.read.load();
    // A sender waits until its chunk is read, and writes the next one.
    if (part.sends ? written != read : written == read) return false;
    if (size == 0) return part.finished = true;
    if (part.sends) {
      std::memcpy(box.data.data(), part.data + part.done, static_cast<size_t>(size));
      box.written.store(written + 1);
    } else {
      std::memcpy(part.arrived.data() + part.done, box.data.data(), static_cast<size_t>(size));
      box.read.store(read + 1);
      part.finished = part.done + size == part.bytes;
    }
    part.done += size;
    return true;
  }

  // How long a batch has made no progress.
  struct Patience {
    int idle = 0;
    Clock::time_point next = Clock::now() + std::chrono::milliseconds(200);
    std::string suspected;
  };
  void wait(Patience& patience) {
    if (++patience.idle < 64) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (header().failed.load() == 2) fail(ErrorCode::rank_failure, header().text.data());
    if (Clock::now() < patience.next) return;
    patience.next = Clock::now() + std::chrono::milliseconds(200);
    if (const auto text = status_->reported(slot_)) fail_deadlock(*text);
    const auto deadlock = status_->deadlock(slot_);
    if (deadlock && deadlock->text == patience.suspected) {
      status_->report(*deadlock);
      fail_deadlock(deadlock->text);
    }
    patience.suspected = deadlock ? deadlock->text : "";
  }

  [[noreturn]] void fail_deadlock(const std::string& text) {
    report("transfers wait for each other: " + text);
  }
  [[noreturn]] void fail_match(const Part& part, int64_t sender, int64_t receiver) {
    const int me = status_->rank(), peer = ranks_[static_cast<size_t>(part.peer)];
    report("transfers of group `" + name_ + "` do not match: rank " + std::to_string(part.sends ? me : peer) +
           " sends with " + said(sender) + ", rank " + std::to_string(part.sends ? peer : me) +
           " receives with " + said(receiver));
  }
  // The other members fail with the same text.
  [[noreturn]] void report(const std::string& text) {
    int32_t none = 0;
    if (header().failed.compare_exchange_strong(none, 1)) {
      header().text.fill('\0');
      text.copy(header().text.data(), header().text.size() - 1);
      header().failed.store(2);
    }
    fail(ErrorCode::rank_failure, text);
  }

  struct Queues {
    Queue transfer, deliver;
  };

  // The queues outlive what is derived from Communicator.
  const int rank_, size_;
  const std::string name_;
  Device& device_;
  // From the first batch on.
  std::optional<Queues> queues_;
  std::shared_ptr<TransferStatus> status_;
  ChannelSlot& slot_;
  std::vector<int> ranks_;  // in the world, by rank in the group
  SharedMemory memory_;
  int64_t started_ = 0;
  // Messages so far, by peer; on the channel's queue.
  std::vector<int64_t> sends_, receives_;
};

}  // namespace

std::unique_ptr<Channel> make_blocking_channel(Communicator& group, Device& device,
                                               std::shared_ptr<TransferStatus> status) {
  return std::make_unique<BlockingChannel>(group, device, std::move(status));
}

}  // namespace capstan::comm
