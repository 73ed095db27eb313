#include "comm/blocking_channel.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "comm/shared_memory.hpp"
#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kChunk = int64_t{32} << 10;  // bytes
// TransferBatch::purpose(): its first characters for messages, and a hash of the full text.
struct Purpose {
  std::array<char, 120> text;
  uint64_t hash;
};
// Limits polling by time, not by count: on a busy machine each yield may wait for all other threads.
constexpr auto kBusyWait = std::chrono::microseconds(50);

// Shared memory through which one rank sends to another, one chunk at a time.
struct alignas(64) Mailbox {
  // Number of messages that the sender and the receiver have begun, and kind and size that each expects for
  // the last one (encode_transfer()).
  std::atomic<int64_t> sends, receives;
  std::atomic<int64_t> sender_transfer, receiver_transfer;
  // The purposes of the last message, written before its number.
  Purpose sender_purpose, receiver_purpose;
  // Chunks written and read so far.
  std::atomic<int64_t> written, read;
  std::array<std::byte, kChunk> data;
};
// Header of a channel's shared memory; the mailboxes [from][to] follow it.
struct alignas(64) Header {
  // 0: no failure; 1: one is being written; 2: `text` is complete.
  std::atomic<int32_t> failed;
  std::array<char, 2048> text;
};

int64_t encode_transfer(TransferBatch::Kind kind, int64_t bytes) {
  return bytes * 4 + static_cast<int64_t>(kind);
}
std::string transfer_text(int64_t encoded) {
  return std::string(name_of(static_cast<TransferBatch::Kind>(encoded % 4))) + " of " +
         std::to_string(encoded / 4) + " bytes";
}

// A transfer between two ranks.
struct PairTransfer {
  TransferBatch::Kind kind;
  bool sends;
  int peer;
  std::byte* data;
  int64_t bytes;
  int64_t done = 0;
  int64_t number = 0;
  bool matched = false, finished = false;
  std::vector<std::byte> arrived;
};

class BlockingChannel final : public TensorChannel {
 public:
  BlockingChannel(Communicator& group, Device& device, std::shared_ptr<TransferStatus> status)
      : TensorChannel(group),
        rank_(group.rank()),
        size_(group.size()),
        name_(group.name()),
        device_(device),
        status_(std::move(status)),
        slot_(status_->add(group)),
        ranks_(TransferStatus::world_ranks(group, status_->rank())),
        memory_(group, sizeof(Header) + sizeof(Mailbox) * ranks_.size() * ranks_.size()),
        published_(group.device_batches()),
        sends_(ranks_.size()),
        receives_(ranks_.size()) {
    clear_published();
  }
  ~BlockingChannel() override {
    // Waits for the batches, which use the members. Their errors are reported where the host waits.
    try {
      if (queues_) device_.record(queues_->deliver)->wait();
    } catch (...) {
    }
    slot_.id.store(0);
    clear_published();
  }

 protected:
  std::unique_ptr<Completion> begin(const TransferBatch& batch, Queue after) override {
    CAPSTAN_ASSERT(&batch.device() == &device_, "a channel of another device");
    if (!queues_)
      queues_ = {.transfer = device_.add_queue(AddedQueue::transfers, "transfers of `" + name_ + "`"),
                 .deliver = device_.add_queue(AddedQueue::delivery, "delivery of `" + name_ + "`")};
    const int64_t number = ++started_;
    if (published_) published_->started.store(number);
    device_.enqueue(after, [this, number] { slot_.ready.store(number); });
    const auto ready = device_.record(after);
    const TransferStatus::StartOrder order = status_->start(slot_, text_of(batch));
    const auto transfers = std::make_shared<std::vector<PairTransfer>>(transfers_of(batch));
    for (const PairTransfer& transfer : *transfers)
      if (transfer.sends && transfer.peer != rank_) sent_ += transfer.bytes;
    device_.enqueue(queues_->transfer, [this, number] { publish(ChannelState::waits_for_compute, number); });
    device_.wait_for(queues_->transfer, *ready);
    const std::string by =
        "transfer " + std::to_string(number) + " of `" + name_ + "` (" + text_of(batch) + ")";
    for (const TransferBatch::Transfer& transfer : batch.transfers())
      if (transfer.from.defined()) declare(queues_->transfer, transfer.from, false, by);
    QueueScope traced(device_, queues_->transfer);
    device_.enqueue(queues_->transfer, [this, number, transfers, order, purpose = batch.purpose(),
                                        text = comm::text_of(batch, ranks_)] {
      publish_begin(number, text);
      purpose_ = {.text = {}, .hash = std::hash<std::string_view>{}(purpose)};
      purpose.copy(purpose_.text.data(), purpose_.text.size() - 1);
      run(number, *transfers, order);
      if (published_) published_->done.store(number);
    });
    traced.end(text_of(batch));
    // Received data arrives late: kernels that do not wait for it read old values.
    device_.wait_for(queues_->deliver, *device_.record(queues_->transfer));
    for (const TransferBatch::Transfer& transfer : batch.transfers()) declare_arrival(transfer, by);
    device_.enqueue(queues_->deliver, [transfers] {
      for (const PairTransfer& transfer : *transfers)
        if (!transfer.sends) std::ranges::copy(transfer.arrived, transfer.data);
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

  void declare(Queue queue, const Tensor& tensor, bool writes, const std::string& by) {
    device_.declare_access(queue, {tensor.address(), tensor.bytes()}, writes, by);
  }
  void declare_arrival(const TransferBatch::Transfer& transfer, const std::string& by) {
    if (!transfer.to.defined()) return;
    std::byte* const to = transfer.to.address();
    const int64_t part = transfer.to.bytes() / size_, own = rank_ * part;
    if (transfer.kind != TransferBatch::Kind::all_gather || transfer.from.address() != to + own)
      return declare(queues_->deliver, transfer.to, true, by);
    // In-place all-gather: this rank's part needs no copy.
    device_.declare_access(queues_->deliver, {to, own}, true, by);
    device_.declare_access(queues_->deliver, {to + own + part, transfer.to.bytes() - own - part}, true, by);
  }
  Header& header() const { return *reinterpret_cast<Header*>(memory_.data()); }
  Mailbox& mailbox(int from, int to) const {
    auto* first = reinterpret_cast<Mailbox*>(memory_.data() + sizeof(Header));
    return first[from * size_ + to];
  }
  Mailbox& mailbox(const PairTransfer& transfer) const {
    return transfer.sends ? mailbox(rank_, transfer.peer) : mailbox(transfer.peer, rank_);
  }

  // A collective consists of a transfer with each other rank and of a transfer of this rank with itself,
  // which copies its own part.
  std::vector<PairTransfer> transfers_of(const TransferBatch& batch) {
    std::vector<PairTransfer> transfers;
    const auto add = [&](TransferBatch::Kind kind, bool sends, int peer, const Tensor& tensor, int64_t at,
                         int64_t bytes) {
      if (bytes > 0)
        transfers.push_back({kind, sends, peer, device_.kernel_address(tensor.address()) + at, bytes});
    };
    for (const TransferBatch::Transfer& t : batch.transfers()) {
      if (t.kind == TransferBatch::Kind::send) add(t.kind, true, t.peer, t.from, 0, t.from.bytes());
      if (t.kind == TransferBatch::Kind::receive) add(t.kind, false, t.peer, t.to, 0, t.to.bytes());
      if (t.peer >= 0) continue;
      const int64_t bytes = t.to.bytes() / size_;
      // Begins with this rank's own part; then each rank sends to a different peer at a time.
      for (int shift = 0; shift < size_; ++shift) {
        const int peer = (rank_ + shift) % size_;
        add(t.kind, true, peer, t.from, t.kind == TransferBatch::Kind::all_gather ? 0 : peer * bytes, bytes);
        add(t.kind, false, peer, t.to, peer * bytes, bytes);
      }
    }
    return transfers;
  }

  void publish(ChannelState state, int64_t number) {
    slot_.batch.store(number);
    slot_.state.store(static_cast<int32_t>(state), std::memory_order_release);
  }
  void publish(const std::vector<PairTransfer>& transfers, int64_t number) {
    const size_t count = std::min(transfers.size(), ChannelSlot::kTransfers);
    for (size_t i = 0; i < count; ++i) {
      TransferSlot& to = slot_.transfers[i];
      to.kind = static_cast<int32_t>(transfers[i].kind);
      to.peer = ranks_[static_cast<size_t>(transfers[i].peer)];
      to.sends = transfers[i].sends ? 1 : 0;
      to.matched = 0;
      to.bytes = transfers[i].bytes;
    }
    slot_.count.store(static_cast<int32_t>(count), std::memory_order_release);
    publish(ChannelState::transfers, number);
  }

  // ---- for the watchdog

  void publish_begin(int64_t number, const std::string& text) {
    if (!published_) return;
    published_->text.fill('\0');
    text.copy(published_->text.data(), published_->text.size() - 1);
    published_->since.store(monotonic_ns());
    published_->begun.store(number, std::memory_order_release);
  }
  // No batch is under way: a batch that has failed is never done.
  void clear_published() {
    if (!published_) return;
    published_->begun.store(0);
    published_->done.store(0);
    published_->started.store(0);
  }

  // Work on the transfer queue of the channel: makes all transfers of a batch.
  void run(int64_t number, std::vector<PairTransfer>& transfers, const TransferStatus::StartOrder& order) {
    TransferStatus::publish_order(slot_, order);
    copy_own(transfers);
    for (PairTransfer& transfer : transfers) {
      auto& count = transfer.sends ? sends_ : receives_;
      transfer.number = ++count[static_cast<size_t>(transfer.peer)];
    }
    publish(transfers, number);
    StallTimer timer;
    for (size_t open = transfers.size(); open > 0;) {
      bool progress = false;
      open = 0;
      for (size_t i = 0; i < transfers.size(); ++i) {
        if (!transfers[i].finished) progress |= advance(transfers, i);
        open += transfers[i].finished ? 0 : 1;
      }
      if (progress)
        timer = {};
      else
        wait(timer);
    }
    publish(ChannelState::idle, number);
  }
  void copy_own(std::vector<PairTransfer>& transfers) {
    const PairTransfer* from = nullptr;
    for (const PairTransfer& transfer : transfers) {
      if (transfer.peer != rank_) continue;
      if (transfer.sends)
        from = &transfer;
      else if (from->data != transfer.data)
        std::memcpy(transfer.data, from->data, static_cast<size_t>(transfer.bytes));
    }
    std::erase_if(transfers, [&](const PairTransfer& transfer) { return transfer.peer == rank_; });
    for (PairTransfer& transfer : transfers)
      if (!transfer.sends) transfer.arrived.resize(static_cast<size_t>(transfer.bytes));
  }

  // One step of a transfer. Messages between two ranks are numbered: the next one of a batch begins after
  // this one.
  bool advance(std::vector<PairTransfer>& transfers, size_t index) {
    PairTransfer& transfer = transfers[index];
    Mailbox& box = mailbox(transfer);
    auto& mine = transfer.sends ? box.sends : box.receives;
    const auto& theirs = transfer.sends ? box.receives : box.sends;
    if (mine.load() < transfer.number) {
      for (size_t i = 0; i < index; ++i)
        if (transfers[i].peer == transfer.peer && transfers[i].sends == transfer.sends &&
            !transfers[i].finished)
          return false;
      // A receive is described as its send.
      const TransferBatch::Kind kind =
          transfer.kind == TransferBatch::Kind::receive ? TransferBatch::Kind::send : transfer.kind;
      (transfer.sends ? box.sender_transfer : box.receiver_transfer)
          .store(encode_transfer(kind, transfer.bytes));
      (transfer.sends ? box.sender_purpose : box.receiver_purpose) = purpose_;
      mine.store(transfer.number);
      return true;
    }
    if (!transfer.matched) {
      if (theirs.load() < transfer.number) return false;
      const int64_t sender = box.sender_transfer.load(), receiver = box.receiver_transfer.load();
      if (sender != receiver || differ(box)) fail_match(transfer, sender, receiver, box);
      // The sender stays in this batch until the data is taken.
      if (!transfer.sends)
        if (const auto text = status_->different_order(slot_, ranks_[static_cast<size_t>(transfer.peer)]))
          report(*text + "; NCCL may then wait forever");
      transfer.matched = true;
      if (index < ChannelSlot::kTransfers) slot_.transfers[index].matched = 1;
      return true;
    }
    const int64_t size = std::min(kChunk, transfer.bytes - transfer.done);
    const int64_t written = box.written.load(), read = box.read.load();
    // A sender waits until its chunk is read, and writes the next one.
    if (transfer.sends ? written != read : written == read) return false;
    if (size == 0) return transfer.finished = true;
    if (transfer.sends) {
      std::memcpy(box.data.data(), transfer.data + transfer.done, static_cast<size_t>(size));
      box.written.store(written + 1);
    } else {
      std::memcpy(transfer.arrived.data() + transfer.done, box.data.data(), static_cast<size_t>(size));
      box.read.store(read + 1);
      transfer.finished = transfer.done + size == transfer.bytes;
    }
    transfer.done += size;
    return true;
  }

  // Counts how long a batch has made no progress, and when to search for a deadlock next.
  struct StallTimer {
    Clock::time_point begin = Clock::now(), next = begin + std::chrono::milliseconds(200);
    std::string suspected;
  };
  void wait(StallTimer& timer) {
    if (Clock::now() - timer.begin < kBusyWait) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (header().failed.load() == 2) fail(ErrorCode::rank_failure, header().text.data());
    if (Clock::now() < timer.next) return;
    timer.next = Clock::now() + std::chrono::milliseconds(200);
    if (const auto text = status_->reported(slot_)) fail_deadlock(*text);
    const auto deadlock = status_->deadlock(slot_);
    if (deadlock && deadlock->text == timer.suspected) {
      status_->report(*deadlock);
      fail_deadlock(deadlock->text);
    }
    timer.suspected = deadlock ? deadlock->text : "";
  }

  [[noreturn]] void fail_deadlock(const std::string& text) {
    report("transfers wait for each other: " + text);
  }
  static bool differ(const Mailbox& box) {
    const Purpose &sender = box.sender_purpose, &receiver = box.receiver_purpose;
    return sender.text[0] && receiver.text[0] && sender.hash != receiver.hash;
  }
  [[noreturn]] void fail_match(const PairTransfer& transfer, int64_t sender, int64_t receiver,
                               const Mailbox& box) {
    const int rank = status_->rank(), peer = ranks_[static_cast<size_t>(transfer.peer)];
    const auto text = [](int64_t encoded, const Purpose& purpose) {
      const std::string what = purpose.text.data();
      return transfer_text(encoded) + (what.empty() ? "" : " (" + what + ")");
    };
    report("transfers of group `" + name_ + "` do not match: rank " +
           std::to_string(transfer.sends ? rank : peer) + " sends with " + text(sender, box.sender_purpose) +
           ", rank " + std::to_string(transfer.sends ? peer : rank) + " receives with " +
           text(receiver, box.receiver_purpose));
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
  // Created with the first batch.
  std::optional<Queues> queues_;
  std::shared_ptr<TransferStatus> status_;
  ChannelSlot& slot_;
  // World ranks, by rank in the group.
  std::vector<int> ranks_;
  SharedMemory memory_;
  DeviceBatches* const published_;
  int64_t started_ = 0;
  // The purpose of the batch under way; used on the transfer queue only.
  Purpose purpose_{};
  // Number of messages to and from each peer so far; used on the transfer queue only.
  std::vector<int64_t> sends_, receives_;
};

}  // namespace

std::unique_ptr<TensorChannel> make_blocking_channel(Communicator& group, Device& device,
                                                     std::shared_ptr<TransferStatus> status) {
  return std::make_unique<BlockingChannel>(group, device, std::move(status));
}

}  // namespace capstan::comm
