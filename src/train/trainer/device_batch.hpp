// A micro-batch on the device, as one rank of a context-parallel group holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "data/loader.hpp"
#include "models/model.hpp"
#include "tensor/pinned_buffer.hpp"

namespace capstan::train {

// The tokens of each sequence that a context-parallel rank holds: those of ops::context_rows().
struct ContextShard {
  int64_t ranks = 1, rank = 0;
  std::vector<int64_t> positions(int64_t seq) const;
};

// The inputs of multi-token prediction that a micro-batch brings with it.
struct MtpInputs {
  // 0: none.
  int64_t depths = 0;
  // Factor of the losses of each depth.
  double loss_factor = 0;
  // With the positions of the tokens, which only learned position embeddings read.
  bool positions = false;
};

// Copies this rank's tokens of a micro-batch to the device, all tensors in one transfer. `dropout_rows`: with
// dropout row indices, which only dropout reads.
models::Batch upload(Device& device, const data::MicroBatch& batch, bool dropout_rows,
                     ContextShard shard = {}, const MtpInputs& mtp = {});

// A micro-batch whose copy was started. The destructor lets the compute queue wait for the copy.
class PendingBatch {
 public:
  PendingBatch(Device& device, models::Batch batch, std::shared_ptr<const Event> copied)
      : device_(&device), batch_(std::move(batch)), copied_(std::move(copied)) {}
  ~PendingBatch() { get(); }
  PendingBatch(PendingBatch&&) noexcept = default;
  PendingBatch& operator=(PendingBatch&&) = delete;

  // Work queued on the compute queue from now on runs after the copy.
  const models::Batch& get() {
    if (copied_) device_->wait_for(Queue::compute, *copied_);
    copied_ = nullptr;
    return batch_;
  }

 private:
  Device* device_;
  models::Batch batch_;
  std::shared_ptr<const Event> copied_;
};

// Copies micro-batches on the host-to-device queue, beside the compute queue, from pinned buffers: one for
// each micro-batch of a step, as long as they take no more than kMaxBytes together, and at least
// kFewestBuffers. With more micro-batches the buffers are used in turn, and the host waits where it is as
// many micro-batches ahead of the device. One buffer where the memory is the host's.
class BatchUploader {
 public:
  static constexpr size_t kFewestBuffers = 4;
  static constexpr int64_t kMaxBytes = int64_t{16} << 20;
  BatchUploader(Device& device, ContextShard shard) : device_(device), shard_(shard) {}
  // Waits for copies that are under way: they read the buffers.
  ~BatchUploader();
  BatchUploader(const BatchUploader&) = delete;
  BatchUploader& operator=(const BatchUploader&) = delete;
  // The next micro-batch is the first of a step: it takes the first buffer, so that the number of buffers in
  // use follows from the number of micro-batches.
  void begin_step() { next_ = 0; }
  // Takes the buffers of a step of `count` micro-batches like this one.
  void reserve(const data::MicroBatch& batch, bool dropout_rows, int64_t count, const MtpInputs& mtp = {});
  // loss_scale: multiplies the loss masks.
  PendingBatch start(const data::MicroBatch& batch, bool dropout_rows, double loss_scale,
                     const MtpInputs& mtp = {});

 private:
  struct Slot {
    PinnedBuffer buffer;
    std::shared_ptr<Event> copied;
  };
  Slot& next_slot(int64_t bytes);
  // Whether there may be one more buffer, of this size.
  bool may_grow(int64_t bytes) const;
  // Makes the buffer at least this large.
  void set_size(Slot& slot, int64_t bytes);

  Device& device_;
  ContextShard shard_;
  std::vector<Slot> slots_;
  // Bytes of all buffers.
  int64_t bytes_ = 0;
  size_t next_ = 0;
};

// The sum of the loss weights of this rank's tokens.
double loss_tokens(const data::MicroBatch& batch, ContextShard shard = {});

}  // namespace capstan::train
