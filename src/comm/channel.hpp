// Transfers of tensors between the ranks of a group, in the order of a device's queues.
//
// Every member starts the same batches in the same order; a send and its receive are matched by this order
// alone. A batch begins when the work queued before it is done, and its transfers begin together, so that two
// ranks which send to each other in one batch do not wait for each other. Batches of one channel follow each
// other; batches of different channels are independent. Ranks that share two groups start the batches of both
// in one order, because NCCL may need that; links between pipeline stages are the exception, where a stage
// posts receives early. The stand-in for NCCL names a violation where kinds, bytes or purposes differ, or
// where two ranks start two groups in different orders; it cannot see that two collectives of the same kind,
// size and purpose were exchanged within a group, nor a cycle of three ranks of which no two share both
// groups.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/tensor.hpp"

namespace capstan::comm {

// Transfers that begin together, as between ncclGroupStart and ncclGroupEnd. Tensors are contiguous. A sent
// tensor may be read meanwhile; a received one must not be used before PendingTransfers::wait().
class TransferBatch {
 public:
  enum class Kind : uint8_t { send, receive, all_gather, all_to_all };
  struct Transfer {
    Kind kind;
    // Group rank, -1 for a collective.
    int peer;
    // Undefined where the transfer does not read or does not write.
    Tensor from, to;
  };

  // purpose: names the contents, the same on all ranks: "gradients of bucket 3". Only this text distinguishes
  // two transfers of the same kind and size whose order was exchanged: ranks compare a 64-bit hash of it, and
  // messages show its first 119 bytes. Empty, in tests: not compared.
  explicit TransferBatch(std::string_view purpose) : purpose_(purpose) {}
  TransferBatch& send(const Tensor& data, int to);
  // data: as many bytes as the peer sends.
  TransferBatch& receive(const Tensor& data, int from);
  // all: the `mine` of all ranks, concatenated by rank; `mine` may be this rank's part of it.
  TransferBatch& all_gather(const Tensor& mine, const Tensor& all);
  // Both consist of as many equal parts as the group has ranks, of the same size: part r of `data` goes to
  // rank r, part r of `received` comes from rank r.
  TransferBatch& all_to_all(const Tensor& data, const Tensor& received);

  const std::vector<Transfer>& transfers() const { return transfers_; }
  const std::string& purpose() const { return purpose_; }
  Device& device() const;

 private:
  friend class PendingTransfers;
  TransferBatch() = default;
  std::vector<Transfer> transfers_;
  std::string purpose_;
};
std::string_view name_of(TransferBatch::Kind kind);
// "receive of 32 bytes from rank 1, send of 32 bytes to rank 1". ranks: what the ranks of the group are
// called; empty: their numbers in it.
std::string text_of(const TransferBatch& batch, std::span<const int> ranks = {});

// A batch that was started, as a channel sees it.
class Completion {
 public:
  virtual ~Completion() = default;
  // Work queued on `queue` from now on runs after the batch.
  virtual void wait(Queue queue) = 0;
};

// A batch under way. Keeps the tensors alive until the compute queue waits for the batch, at the latest in
// the destructor.
class PendingTransfers {
 public:
  PendingTransfers() = default;
  PendingTransfers(TransferBatch batch, std::unique_ptr<Completion> completion)
      : batch_(std::move(batch)), completion_(std::move(completion)) {}
  ~PendingTransfers();
  PendingTransfers(PendingTransfers&&) noexcept = default;
  PendingTransfers& operator=(PendingTransfers&& other) noexcept;

  // Kernels launched on `queue` from now on run after the batch. A second call for the compute queue does
  // nothing. Transport errors are ErrorCode::rank_failure, here or where the host next waits for the device.
  void wait(Queue queue = Queue::compute);

 private:
  void release() noexcept;
  TransferBatch batch_;
  std::unique_ptr<Completion> completion_;
};

class TensorChannel {
 public:
  virtual ~TensorChannel() = default;
  // Starts a batch after the work that was queued on `after`. On the meta device it only counts bytes.
  PendingTransfers start(TransferBatch batch, Queue after = Queue::compute);
  // Sent to other ranks by the channel itself; Communicator::sent_bytes() counts the others.
  int64_t sent_bytes() const { return sent_; }

 protected:
  explicit TensorChannel(Communicator& group) : group_(group) {}
  virtual std::unique_ptr<Completion> begin(const TransferBatch& batch, Queue after) = 0;
  // On the meta device: takes the memory that begin() takes, besides the tensors.
  virtual std::unique_ptr<Completion> begin_on_meta(const TransferBatch& batch);
  Communicator& group_;
  int64_t sent_ = 0;
};

// A channel through host memory. It copies sent tensors to the host first, and received data to the device
// afterward, on the copy queues and in buffers of Device::pinned_pool(); without a copy where the host can
// access the device's memory. The host waits in start() for the data, and in wait() for the transport.
std::unique_ptr<TensorChannel> make_staging_channel(Communicator& group);
// For the meta device: stands for a channel that needs no host memory, such as NCCL.
std::unique_ptr<TensorChannel> make_direct_meta_channel(Communicator& group);

// The next and the previous rank of a ring.
inline int next_in(const Communicator& group) {
  return (group.rank() + 1) % group.size();
}
inline int previous_in(const Communicator& group) {
  return (group.rank() + group.size() - 1) % group.size();
}

}  // namespace capstan::comm
