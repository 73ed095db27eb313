// Transfers through host memory, carried by a communicator.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "comm/channel.hpp"

namespace capstan::comm {

namespace {

using Buffer = std::vector<std::byte>;

class StagedBatch final : public Completion {
 public:
  StagedBatch(Device& device, Queue after) : device_(device), ready_(device.record(after)) {}
  ~StagedBatch() override {
    works_.clear();  // waits for the transport, which uses the buffers
  }

  // Copies what is sent to the host, where it cannot be read directly, and waits until it is there.
  void stage_sends(const Batch& batch) {
    bool copies = false;
    std::optional<QueueScope> traced;
    for (const Batch::Transfer& transfer : batch.transfers()) {
      if (!transfer.from.defined()) continue;
      const Tensor& tensor = transfer.from;
      std::byte* address = device_.host_address(tensor.address());
      if (!address) {
        if (!std::exchange(copies, true)) {
          device_.wait_for(Queue::device_to_host, *ready_);
          traced.emplace(device_, Queue::device_to_host);
        }
        Buffer& buffer = buffers_.emplace_back(static_cast<size_t>(tensor.bytes()));
        device_.start_copy_to_host(buffer.data(), tensor.address(), tensor.bytes(), Queue::device_to_host);
        address = buffer.data();
      }
      sources_.push_back(address);
    }
    if (traced) traced->end("copy for " + text_of(batch));
    if (copies)
      device_.record(Queue::device_to_host)->wait();
    else
      ready_->wait();
  }
  void start(const Batch& batch, Communicator& group) {
    size_t source = 0;
    // Receives first: MPI need not buffer a message that is expected.
    for (const Batch::Transfer& transfer : batch.transfers())
      if (transfer.kind == Batch::Kind::receive)
        works_.push_back(group.start_receive(target(transfer.to), transfer.to.bytes(), transfer.peer));
    for (const Batch::Transfer& transfer : batch.transfers()) {
      if (transfer.kind == Batch::Kind::receive) continue;
      const std::byte* from = sources_[source++];
      if (transfer.kind == Batch::Kind::send)
        works_.push_back(group.start_send(from, transfer.from.bytes(), transfer.peer));
      else if (transfer.kind == Batch::Kind::all_gather)
        works_.push_back(group.start_all_gather(from, target(transfer.to), transfer.from.bytes()));
      else
        works_.push_back(
            group.start_all_to_all(from, target(transfer.to), transfer.from.bytes() / group.size()));
    }
  }

  void wait(Queue queue) override {
    if (!complete_) finish();
    device_.wait_for(queue, *complete_);
  }

 private:
  struct Received {
    Tensor to;
    size_t buffer;
  };
  std::byte* target(const Tensor& tensor) {
    if (std::byte* address = device_.host_address(tensor.address())) return address;
    received_.push_back({tensor, buffers_.size()});
    return buffers_.emplace_back(static_cast<size_t>(tensor.bytes())).data();
  }
  void finish() {
    for (const WorkHandle& work : works_) work->wait();
    works_.clear();
    // The targets were allocated, and perhaps used, by work before the batch.
    if (!received_.empty()) device_.wait_for(Queue::communication, *ready_);
    QueueScope traced(device_, Queue::communication);
    for (const Received& one : received_)
      device_.start_copy_to_device(one.to.address(), buffers_[one.buffer].data(), one.to.bytes(),
                                   Queue::communication);
    if (!received_.empty()) traced.end("copy of what has arrived");
    complete_ = device_.record(Queue::communication);
    // Keeps the host buffers alive until the copies have run.
    if (!received_.empty())
      device_.enqueue(Queue::communication,
                      [kept = std::make_shared<std::vector<Buffer>>(std::move(buffers_))] {});
    received_.clear();
  }

  Device& device_;
  std::unique_ptr<Event> ready_, complete_;
  std::vector<const std::byte*> sources_;
  std::vector<Received> received_;
  // Before works_: they are used until those have ended.
  std::vector<Buffer> buffers_;
  std::vector<WorkHandle> works_;
};

class StagingChannel final : public Channel {
 public:
  explicit StagingChannel(Communicator& group) : Channel(group) {}

 protected:
  std::unique_ptr<Completion> begin(const Batch& batch, Queue after) override {
    auto staged = std::make_unique<StagedBatch>(batch.device(), after);
    staged->stage_sends(batch);
    staged->start(batch, group_);
    return staged;
  }
};

}  // namespace

std::unique_ptr<Channel> make_staging_channel(Communicator& group) {
  return std::make_unique<StagingChannel>(group);
}

}  // namespace capstan::comm
