// Transfers through host memory, made by a communicator.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "comm/channel.hpp"
#include "tensor/flat_range.hpp"
#include "tensor/pinned_buffer.hpp"

namespace capstan::comm {

namespace {

// The host buffers of a batch, until the copies from them are done.
class StagingBuffers {
 public:
  explicit StagingBuffers(Device& device) : device_(device) {}
  ~StagingBuffers() { give_back(nullptr); }
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  std::byte* take(int64_t bytes) { return buffers_.emplace_back(device_.pinned_pool().take(bytes)).data(); }
  void give_back(const std::shared_ptr<Event>& last_use) {
    for (PinnedBuffer& buffer : buffers_) device_.pinned_pool().give_back(std::move(buffer), last_use);
    buffers_.clear();
  }

 private:
  Device& device_;
  std::vector<PinnedBuffer> buffers_;
};

// The bytes of a received tensor that the transfer changes. An all-gather in place leaves this rank's part,
// which other queues may read meanwhile.
std::vector<FlatRange> changed_bytes(const TransferBatch::Transfer& transfer, int rank) {
  const FlatRange all{0, transfer.to.bytes()};
  if (transfer.kind != TransferBatch::Kind::all_gather) return {all};
  const int64_t part = transfer.from.bytes();
  const FlatRange before{0, rank * part}, after{(rank + 1) * part, all.count - (rank + 1) * part};
  if (transfer.from.address() != transfer.to.address() + before.count) return {all};
  if (before.count == 0) return {after};
  return after.count == 0 ? std::vector{before} : std::vector{before, after};
}

// Counts the copies of a batch, and holds its buffers as long as StagedBatch does.
class MetaStagedBatch final : public Completion {
 public:
  MetaStagedBatch(const TransferBatch& batch, int rank) : buffers_(batch.device()) {
    Device& device = batch.device();
    for (const TransferBatch::Transfer& transfer : batch.transfers()) {
      if (const Tensor& from = transfer.from; from.defined())
        device.start_copy_to_host(buffers_.take(from.bytes()), from.address(), from.bytes(),
                                  Queue::device_to_host);
      if (const Tensor& to = transfer.to; to.defined()) {
        const std::byte* const buffer = buffers_.take(to.bytes());
        for (const FlatRange& range : changed_bytes(transfer, rank))
          device.start_copy_to_device(to.address() + range.begin, buffer + range.begin, range.count,
                                      Queue::communication);
      }
    }
  }
  void wait(Queue) override { buffers_.give_back(nullptr); }

 private:
  StagingBuffers buffers_;
};

class StagedBatch final : public Completion {
 public:
  StagedBatch(Device& device, Queue after)
      : device_(device), ready_(device.record(after)), buffers_(device) {}
  ~StagedBatch() override {
    // Waits for the transport, which uses the buffers.
    works_.clear();
  }

  // Copies what is sent to the host, where it cannot be read directly, and waits until it is there.
  void stage_sends(const TransferBatch& batch) {
    bool copies = false;
    std::optional<QueueScope> traced;
    for (const TransferBatch::Transfer& transfer : batch.transfers()) {
      if (!transfer.from.defined()) continue;
      const Tensor& tensor = transfer.from;
      std::byte* address = device_.host_address(tensor.address());
      if (!address) {
        if (!std::exchange(copies, true)) {
          device_.wait_for(Queue::device_to_host, *ready_);
          traced.emplace(device_, Queue::device_to_host);
        }
        address = buffers_.take(tensor.bytes());
        device_.start_copy_to_host(address, tensor.address(), tensor.bytes(), Queue::device_to_host);
      }
      sources_.push_back(address);
    }
    if (traced) traced->end("copy for " + text_of(batch));
    if (copies)
      device_.record(Queue::device_to_host)->wait();
    else
      ready_->wait();
  }
  void start(const TransferBatch& batch, Communicator& group) {
    size_t source = 0;
    // Receives first: MPI need not buffer a message that is expected.
    for (const TransferBatch::Transfer& transfer : batch.transfers())
      if (transfer.kind == TransferBatch::Kind::receive)
        works_.push_back(group.start_receive(target(transfer, group), transfer.to.bytes(), transfer.peer));
    for (const TransferBatch::Transfer& transfer : batch.transfers()) {
      if (transfer.kind == TransferBatch::Kind::receive) continue;
      std::byte* const from = sources_[source++];
      // The transport reads it from now on.
      device_.declare_host_access({from, transfer.from.bytes()}, false);
      if (transfer.kind == TransferBatch::Kind::send)
        works_.push_back(group.start_send(from, transfer.from.bytes(), transfer.peer));
      else if (transfer.kind == TransferBatch::Kind::all_gather)
        works_.push_back(group.start_all_gather(from, target(transfer, group), transfer.from.bytes()));
      else
        works_.push_back(
            group.start_all_to_all(from, target(transfer, group), transfer.from.bytes() / group.size()));
    }
  }

  void wait(Queue queue) override {
    if (!complete_) finish();
    device_.wait_for(queue, *complete_);
  }

 private:
  struct Received {
    Tensor to;
    const std::byte* buffer;
    std::vector<FlatRange> changed;
  };
  // Where the host receives a transfer.
  std::byte* target(const TransferBatch::Transfer& transfer, const Communicator& group) {
    if (std::byte* address = device_.host_address(transfer.to.address())) return address;
    std::byte* const buffer = buffers_.take(transfer.to.bytes());
    received_.push_back({transfer.to, buffer, changed_bytes(transfer, group.rank())});
    return buffer;
  }
  void finish() {
    for (const WorkHandle& work : works_) work->wait();
    works_.clear();
    // The targets were allocated, and perhaps used, by work before the batch.
    if (!received_.empty()) device_.wait_for(Queue::communication, *ready_);
    QueueScope traced(device_, Queue::communication);
    for (const Received& one : received_)
      for (const FlatRange& range : one.changed)
        device_.start_copy_to_device(one.to.address() + range.begin, one.buffer + range.begin, range.count,
                                     Queue::communication);
    if (!received_.empty()) traced.end("copy of what has arrived");
    complete_ = device_.record(Queue::communication);
    buffers_.give_back(complete_);
    received_.clear();
  }

  Device& device_;
  std::unique_ptr<Event> ready_;
  std::shared_ptr<Event> complete_;
  std::vector<std::byte*> sources_;
  std::vector<Received> received_;
  // Declared before works_, which uses the buffers until its transfers have ended.
  StagingBuffers buffers_;
  std::vector<WorkHandle> works_;
};

class StagingChannel final : public TensorChannel {
 public:
  explicit StagingChannel(Communicator& group) : TensorChannel(group) {}

 protected:
  std::unique_ptr<Completion> begin(const TransferBatch& batch, Queue after) override {
    auto staged = std::make_unique<StagedBatch>(batch.device(), after);
    staged->stage_sends(batch);
    staged->start(batch, group_);
    return staged;
  }
  std::unique_ptr<Completion> begin_on_meta(const TransferBatch& batch) override {
    if (batch.device().shares_host_memory()) return TensorChannel::begin_on_meta(batch);
    return std::make_unique<MetaStagedBatch>(batch, group_.rank());
  }
};

}  // namespace

std::unique_ptr<TensorChannel> make_staging_channel(Communicator& group) {
  return std::make_unique<StagingChannel>(group);
}

}  // namespace capstan::comm
