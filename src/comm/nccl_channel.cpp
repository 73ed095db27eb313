#include "comm/nccl_channel.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/collective_errors.hpp"
#include "comm/transfer_status.hpp"
#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

namespace {

using Seconds = std::chrono::duration<double>;
using cuda::OpenCommunicator;
using cuda::Status;
using cuda::StatusCode;

class NcclChannel final : public TensorChannel, public WatchedTransfers {
 public:
  NcclChannel(Communicator& group, cuda::CudaDevice& device, const NcclOptions& options)
      : TensorChannel(group),
        rank_(group.rank()),
        size_(group.size()),
        name_(group.name()),
        device_(device),
        nccl_(*device.communicator()),
        options_(options),
        ranks_(TransferStatus::world_ranks(group, options.world_rank)),
        published_(group.device_batches()),
        queue_(device.add_queue(AddedQueue::transfers, "transfers of `" + name_ + "`")) {
    try {
      join();
    } catch (...) {
      if (communicator_) (void)nccl_.abort(communicator_);
      throw;
    }
    watched_ = options_.watch != nullptr;
    if (watched_) options_.watch->add(*this);
  }
  ~NcclChannel() override {
    // Batches use the members. An error is reported where the host waits for the device.
    try {
      if (!is_failing()) device_.record(queue_)->wait();
    } catch (...) {
    }
    if (std::exchange(watched_, false)) options_.watch->remove(*this);
    leave();
  }

  // ---- for the watchdog

  std::optional<std::string> poll() override {
    std::string where;
    {
      const std::lock_guard lock(batches_mutex_);
      retire_batches();
      publish_batch();
      where = batches_.empty()
                  ? "after transfer batch " + std::to_string(retired_) + " of group `" + name_ + "`"
                  : "in " + describe(batches_.front());
    }
    // If the main thread holds the lock, it is in a call of NCCL and finds the error itself.
    const std::unique_lock lock(calls_mutex_, std::try_to_lock);
    if (!lock || !communicator_) return std::nullopt;
    const Status status = nccl_.get_async_error(communicator_);
    if (status.ok() || status.code == StatusCode::not_ready) return std::nullopt;
    return where + ", NCCL reports: " + text_of(status);
  }
  void fail(const Error& error) noexcept override {
    device_.set_failure(error);
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = error;
  }
  void abort() noexcept override {
    // A communicator whose call of NCCL does not return is not aborted; the watchdog ends the process anyway.
    std::unique_lock lock(calls_mutex_, kMaxCallTime);
    if (!lock) return;
    OpenCommunicator* const communicator = std::exchange(communicator_, nullptr);
    lock.unlock();
    if (communicator) (void)nccl_.abort(communicator);
  }

 protected:
  std::unique_ptr<Completion> begin(const TransferBatch& batch, Queue after) override {
    CAPSTAN_ASSERT(&batch.device() == &device_, "a channel of another device");
    const std::shared_ptr<Event> ready = device_.record(after);
    device_.wait_for(queue_, *ready);
    for (const TransferBatch::Transfer& transfer : batch.transfers()) sent_ += sent_bytes_of(transfer);
    QueueScope traced(device_, queue_);
    const std::string what = note_start(batch, ready);
    {
      const std::lock_guard lock(calls_mutex_);
      throw_failure();
      check(nccl_.group_start(), "begin " + what);
      const Status queued = queue_transfers(batch);
      const std::string problem = text_of(queued);
      const Status ended = nccl_.group_end();
      if (!queued.ok()) fail_call("queue " + what, problem);
      check(ended, "start " + what);
    }
    wait_until_ready("start " + what, std::nullopt);
    traced.end(comm::text_of(batch));
    std::shared_ptr<Event> done = device_.record(queue_);
    {
      const std::lock_guard lock(batches_mutex_);
      batches_.back().done = done;
    }
    return std::make_unique<Queued>(device_, std::move(done));
  }

 private:
  class Queued final : public Completion {
   public:
    Queued(Device& device, std::shared_ptr<Event> done) : device_(device), done_(std::move(done)) {}
    void wait(Queue queue) override { device_.wait_for(queue, *done_); }

   private:
    Device& device_;
    std::shared_ptr<Event> done_;
  };
  // A batch that the host has started.
  struct Batch {
    int64_t number;
    // Description of the transfers, with world ranks.
    std::string transfers;
    // `done` is null while the host is in the calls of NCCL.
    std::shared_ptr<Event> ready, done;
  };

  // ---- the communicator

  void join() {
    cuda::UniqueId id;
    run_collectively(group_, "making a NCCL communicator", [&] {
      if (rank_ == 0) check(nccl_.get_unique_id(&id), "make the id of the communicator");
    });
    group_.broadcast(&id, sizeof id, 0);
    const std::string action = "join the communicator of " + std::to_string(size_) + " ranks";
    run_collectively(group_, "joining a NCCL communicator", [&] {
      check(nccl_.init_rank(device_.handle(), size_, &id, rank_, &communicator_), action);
    });
    wait_until_ready(action, options_.timeout);
  }
  // True after an error: the other ranks may then not finalize the communicator.
  bool is_failing() {
    const std::lock_guard lock(failure_mutex_);
    return failure_ || std::uncaught_exceptions() > 0;
  }
  void leave() noexcept {
    if (!communicator_) return;
    try {
      if (!is_failing()) {
        constexpr double kMaxEndWait = 30;  // seconds
        check(nccl_.finalize(communicator_), "end the communicator");
        wait_until_ready("end the communicator", std::min(options_.timeout, kMaxEndWait));
        (void)nccl_.destroy(std::exchange(communicator_, nullptr));
        return;
      }
    } catch (...) {
    }
    if (communicator_) (void)nccl_.abort(std::exchange(communicator_, nullptr));
  }

  // Waits until earlier calls are complete. limit: largest wait in seconds.
  void wait_until_ready(const std::string& action, std::optional<double> limit) {
    // Limits polling by time, not by count: on a busy machine each yield may wait for all other threads.
    constexpr Seconds kBusyPolling = std::chrono::microseconds(500);
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      Status status;
      {
        const std::lock_guard lock(calls_mutex_);
        throw_failure();
        status = nccl_.get_async_error(communicator_);
      }
      if (status.ok()) return;
      if (status.code != StatusCode::not_ready) fail_transport(action, text_of(status));
      const Seconds waited = std::chrono::steady_clock::now() - start;
      if (waited < kBusyPolling)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (limit && waited.count() > *limit)
        fail_call(action, "timed out after " + fixed(*limit, 1) +
                              " s (resilience.timeout): not all ranks reached it");
    }
  }

  static std::string text_of(const Status& status) { return status.text ? status.text : "no reason given"; }
  // Throws unless the call is complete or in progress.
  void check(const Status& status, const std::string& action) const {
    if (!status.ok() && status.code != StatusCode::not_ready) fail_call(action, text_of(status));
  }
  [[noreturn]] void fail_call(const std::string& action, const std::string& problem) const {
    capstan::fail(ErrorCode::rank_failure,
                  "rank " + std::to_string(options_.world_rank) + ", group `" + name_ + "`: NCCL cannot " +
                      action + ": " + problem,
                  "set NCCL_DEBUG=WARN for NCCL's own log (docs/multi-node.md)");
  }
  // Waits a few seconds before it throws: if a rank has ended, the transports of all others fail, and the
  // error of the watchdog names that rank.
  [[noreturn]] void fail_transport(const std::string& action, const std::string& problem) {
    constexpr int kMaxWait = 5'000;  // ms
    for (int waited = 0; watched_ && waited < kMaxWait; waited += 10) {
      throw_failure();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    fail_call(action, problem);
  }
  void throw_failure() {
    const std::lock_guard lock(failure_mutex_);
    if (failure_) throw Error(*failure_);
  }

  // ---- transfers

  int64_t sent_bytes_of(const TransferBatch::Transfer& transfer) const {
    switch (transfer.kind) {
      case TransferBatch::Kind::send:
        return transfer.peer == rank_ ? 0 : transfer.from.bytes();
      case TransferBatch::Kind::receive:
        return 0;
      case TransferBatch::Kind::all_gather:
        return transfer.from.bytes() * (size_ - 1);
      case TransferBatch::Kind::all_to_all:
        return transfer.from.bytes() / size_ * (size_ - 1);
    }
    return 0;
  }

  // Returns the first error.
  Status queue_transfers(const TransferBatch& batch) {
    for (const TransferBatch::Transfer& transfer : batch.transfers())
      if (const Status status = queue_transfer(transfer);
          !status.ok() && status.code != StatusCode::not_ready)
        return status;
    return {};
  }
  Status queue_transfer(const TransferBatch::Transfer& transfer) {
    const auto address = [&](const Tensor& tensor) {
      return tensor.defined() ? device_.kernel_address(tensor.address()) : nullptr;
    };
    std::byte *const from = address(transfer.from), *const to = address(transfer.to);
    void* const stream = device_.stream(queue_);
    switch (transfer.kind) {
      case TransferBatch::Kind::send:
        return nccl_.send(communicator_, from, transfer.from.bytes(), transfer.peer, stream);
      case TransferBatch::Kind::receive:
        return nccl_.receive(communicator_, to, transfer.to.bytes(), transfer.peer, stream);
      case TransferBatch::Kind::all_gather:
        return nccl_.all_gather(communicator_, from, to, transfer.from.bytes(), stream);
      case TransferBatch::Kind::all_to_all:
        break;
    }
    const int64_t part = transfer.from.bytes() / size_;
    for (int peer = 0; peer < size_; ++peer) {
      Status status = nccl_.send(communicator_, from + peer * part, part, peer, stream);
      if (status.ok() || status.code == StatusCode::not_ready)
        status = nccl_.receive(communicator_, to + peer * part, part, peer, stream);
      if (!status.ok() && status.code != StatusCode::not_ready) return status;
    }
    return {};
  }

  // ---- batches under way

  // Returns the description of the batch.
  std::string note_start(const TransferBatch& batch, const std::shared_ptr<Event>& ready) {
    const std::lock_guard lock(batches_mutex_);
    retire_batches();
    batches_.push_back({++started_, comm::text_of(batch, ranks_), ready, nullptr});
    if (published_) published_->started.store(started_);
    return describe(batches_.back());
  }
  std::string describe(const Batch& batch) const {
    return "transfer batch " + std::to_string(batch.number) + " of group `" + name_ + "` (" +
           batch.transfers + ")";
  }
  void retire_batches() {
    while (!batches_.empty() && batches_.front().done && batches_.front().done->done()) {
      retired_ = batches_.front().number;
      batches_.pop_front();
    }
  }
  void publish_batch() {
    if (!published_) return;
    published_->done.store(retired_);
    if (published_->begun.load() < retired_) published_->begun.store(retired_);
    if (batches_.empty()) return;
    const Batch& first = batches_.front();
    // A batch begins when the work before it is done, or when the host waits for the peers to connect.
    const bool begun = !first.done || first.ready->done();
    if (!begun || published_->begun.load() == first.number) return;
    published_->text.fill('\0');
    first.transfers.copy(published_->text.data(), published_->text.size() - 1);
    published_->since.store(monotonic_ns());
    published_->begun.store(first.number, std::memory_order_release);
  }

  static constexpr std::chrono::seconds kMaxCallTime{5};

  // Copied from the group, because queued work outlives objects derived from Communicator.
  const int rank_, size_;
  const std::string name_;
  cuda::CudaDevice& device_;
  const cuda::Communicator& nccl_;
  const NcclOptions options_;
  // World ranks, by rank in the group.
  const std::vector<int> ranks_;
  DeviceBatches* const published_;
  const Queue queue_;

  // Whether the watchdog knows this channel.
  bool watched_ = false;
  // Held during each call of NCCL on the communicator, which is null once it was aborted.
  std::timed_mutex calls_mutex_;
  OpenCommunicator* communicator_ = nullptr;
  std::mutex failure_mutex_;
  std::optional<Error> failure_;
  std::mutex batches_mutex_;
  // Batches that are not known to be done, in the order of their start.
  std::deque<Batch> batches_;
  int64_t started_ = 0, retired_ = 0;
};

}  // namespace

std::unique_ptr<TensorChannel> make_nccl_channel(Communicator& group, cuda::CudaDevice& device,
                                                 const NcclOptions& options) {
  CAPSTAN_ASSERT(device.communicator(), "a CUDA backend without communicators");
  return std::make_unique<NcclChannel>(group, device, options);
}

}  // namespace capstan::comm
