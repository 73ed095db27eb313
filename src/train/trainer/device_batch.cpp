#include "train/trainer/device_batch.hpp"

#include <algorithm>
#include <span>

#include "base/checked.hpp"
#include "data/later_tokens.hpp"
#include "ops/context_attention.hpp"

namespace capstan::train {

std::vector<int64_t> ContextShard::positions(int64_t seq) const {
  std::vector<int64_t> result;
  for (const kernels::PositionSegment& segment : ops::context_rows(ranks, rank, seq).segments)
    for (int64_t p = segment.begin; p < segment.end(); ++p) result.push_back(p);
  return result;
}

double loss_tokens(const data::MicroBatch& batch, ContextShard shard) {
  double sum = 0;
  const auto positions = shard.positions(batch.sequence_length);
  for (int64_t row = 0; row < batch.rows; ++row)
    for (const int64_t p : positions)
      sum += static_cast<double>(batch.loss_mask[static_cast<size_t>(row * batch.sequence_length + p)]);
  return sum;
}

namespace {

// The bounds of all documents of all rows, one after the other: cu_seqlens of the batch.
std::vector<int32_t> cumulative_lengths(const data::MicroBatch& batch) {
  std::vector<int32_t> bounds{0};
  for (size_t row = 0; row < batch.cu_seqlens.size(); ++row) {
    const auto first = static_cast<int32_t>(static_cast<int64_t>(row) * batch.sequence_length);
    for (size_t i = 1; i < batch.cu_seqlens[row].size(); ++i)
      bounds.push_back(first + batch.cu_seqlens[row][i]);
  }
  return bounds;
}

// A micro-batch in one buffer: where each tensor begins, 64-byte aligned.
class PackedBatch {
 public:
  PackedBatch(const data::MicroBatch& batch, const ContextShard& shard, bool dropout_rows,
              const MtpInputs& mtp)
      : batch_(batch),
        mtp_(mtp),
        positions_(shard.positions(batch.sequence_length)),
        elements_(batch.rows * static_cast<int64_t>(positions_.size())) {
    const bool packed = std::any_of(batch.cu_seqlens.begin(), batch.cu_seqlens.end(),
                                    [](const auto& c) { return c.size() > 2; });
    for (int64_t* offset : {&tokens_, &labels_, &loss_mask_, &position_ids_}) *offset = add(4);
    if (packed) {
      document_start_ = add(4);
      cu_seqlens_ = cumulative_lengths(batch);
      cu_seqlens_offset_ = bytes_;
      bytes_ = round_up(bytes_ + size_of_cu_seqlens(), 64);
    }
    if (dropout_rows) dropout_rows_ = add(8);
    for (const int32_t length : batch.lengths) tokens_in_use_ += length;
    const bool padded = !batch.lengths.empty() && tokens_in_use_ < batch.rows * batch.sequence_length;
    if (padded) padding_ = add(4);
    later_.resize(static_cast<size_t>(mtp.depths));
    for (LaterOffsets& later : later_) {
      for (int64_t* offset : {&later.tokens, &later.labels, &later.loss_mask}) *offset = add(4);
      if (mtp.positions) later.positions = add(4);
    }
  }
  int64_t bytes() const { return bytes_; }

  void write(std::byte* to, double loss_scale) const {
    copy<int32_t>(to + tokens_, batch_.tokens);
    copy<int32_t>(to + labels_, batch_.labels);
    scale(to + loss_mask_, batch_.loss_mask, loss_scale);
    copy<int32_t>(to + position_ids_, batch_.position_ids);
    if (document_start_ >= 0)
      fill<int32_t>(to + document_start_, [this](int64_t row, int64_t p) {
        const auto& bounds = batch_.cu_seqlens[static_cast<size_t>(row)];
        return *(std::upper_bound(bounds.begin(), bounds.end(), static_cast<int32_t>(p)) - 1);
      });
    std::ranges::copy(std::as_bytes(std::span(cu_seqlens_)), to + cu_seqlens_offset_);
    // (consumed-sample number, position in the sample): the same on every layout. 2^24 positions, 2^39
    // samples.
    if (dropout_rows_ >= 0)
      fill<int64_t>(to + dropout_rows_, [this](int64_t row, int64_t p) {
        return static_cast<int64_t>(batch_.sample_ids[static_cast<size_t>(row)] << 24) + p;
      });
    if (padding_ >= 0)
      fill<int32_t>(to + padding_, [this](int64_t row, int64_t p) {
        return p >= batch_.lengths[static_cast<size_t>(row)] ? 1 : 0;
      });
    for (size_t i = 0; i < later_.size(); ++i) {
      const data::LaterTokens later = data::later_tokens(batch_, static_cast<int64_t>(i + 1));
      copy<int32_t>(to + later_[i].tokens, later.tokens);
      copy<int32_t>(to + later_[i].labels, later.labels);
      scale(to + later_[i].loss_mask, later.loss_mask, loss_scale * mtp_.loss_factor);
      if (mtp_.positions) copy<int32_t>(to + later_[i].positions, later.position_ids);
    }
  }

  // The tensors in a copy of the buffer.
  models::Batch views(const Tensor& buffer) const {
    const auto view = [&](int64_t offset, DType dtype) {
      const int64_t bytes = elements_ * size_of(dtype);
      return offset < 0 ? Tensor() : buffer.flat_range(offset, bytes, {bytes}).as_type(dtype);
    };
    models::Batch result;
    result.batch = batch_.rows;
    result.seq = static_cast<int64_t>(positions_.size());
    result.positions_end = batch_.sequence_length;
    result.tokens = view(tokens_, DType::i32);
    result.labels = view(labels_, DType::i32);
    result.loss_mask = view(loss_mask_, DType::f32);
    result.positions = view(position_ids_, DType::i32);
    result.document_start = view(document_start_, DType::i32);
    result.dropout_rows = view(dropout_rows_, DType::i64);
    result.padding = view(padding_, DType::i32);
    result.tokens_in_use = tokens_in_use_;
    for (const LaterOffsets& later : later_)
      result.later.push_back({view(later.tokens, DType::i32), view(later.labels, DType::i32),
                              view(later.loss_mask, DType::f32), view(later.positions, DType::i32)});
    if (document_start_ >= 0) {
      const int64_t bytes = size_of_cu_seqlens();
      result.cu_seqlens = buffer.flat_range(cu_seqlens_offset_, bytes, {bytes}).as_type(DType::i32);
      for (size_t i = 1; i < cu_seqlens_.size(); ++i)
        result.max_seqlen = std::max(result.max_seqlen, int64_t{cu_seqlens_[i]} - cu_seqlens_[i - 1]);
    }
    return result;
  }

 private:
  struct LaterOffsets {
    int64_t tokens = -1, labels = -1, loss_mask = -1, positions = -1;
  };
  int64_t size_of_cu_seqlens() const { return static_cast<int64_t>(cu_seqlens_.size() * sizeof(int32_t)); }
  int64_t add(int64_t element_bytes) {
    const int64_t offset = bytes_;
    bytes_ = round_up(bytes_ + elements_ * element_bytes, 64);
    return offset;
  }
  // value_of(sequence, position in it), for every token of this rank.
  template <class T>
  void fill(std::byte* to, const auto& value_of) const {
    T* out = reinterpret_cast<T*>(to);
    for (int64_t row = 0; row < batch_.rows; ++row)
      for (const int64_t p : positions_) *out++ = static_cast<T>(value_of(row, p));
  }

  // This rank's tokens of all[B, T].
  template <class T>
  void copy(std::byte* to, const std::vector<T>& all) const {
    fill<T>(to, [&](int64_t row, int64_t p) {
      return all[static_cast<size_t>(row * batch_.sequence_length + p)];
    });
  }
  void scale(std::byte* to, const std::vector<float>& mask, double factor) const {
    fill<float>(to, [&, factor = static_cast<float>(factor)](int64_t row, int64_t p) {
      return mask[static_cast<size_t>(row * batch_.sequence_length + p)] * factor;
    });
  }

  const data::MicroBatch& batch_;
  const MtpInputs mtp_;
  std::vector<int64_t> positions_;
  int64_t elements_, bytes_ = 0;
  // Offsets; -1: absent.
  int64_t tokens_ = -1, labels_ = -1, loss_mask_ = -1, position_ids_ = -1, document_start_ = -1,
          dropout_rows_ = -1, padding_ = -1;
  // Of all rows; 0: the batch does not say.
  int64_t tokens_in_use_ = 0;
  // Empty without documents.
  std::vector<int32_t> cu_seqlens_;
  int64_t cu_seqlens_offset_ = 0;
  // By depth of multi-token prediction.
  std::vector<LaterOffsets> later_;
};

Tensor device_buffer(Device& device, const PackedBatch& packed) {
  CategoryScope scope(MemoryCategory::data);
  return Tensor::empty(device, {packed.bytes()}, DType::u8);
}

}  // namespace

models::Batch upload(Device& device, const data::MicroBatch& batch, bool dropout_rows, ContextShard shard,
                     const MtpInputs& mtp) {
  const PackedBatch packed(batch, shard, dropout_rows, mtp);
  std::vector<std::byte> bytes(static_cast<size_t>(packed.bytes()));
  packed.write(bytes.data(), 1);
  const Tensor buffer = device_buffer(device, packed);
  buffer.copy_from_host_bytes(bytes);
  return packed.views(buffer);
}

// An error of a queue is reported where the host waits for its results.
BatchUploader::~BatchUploader() {
  for (const Slot& slot : slots_) try {
      if (slot.copied) slot.copied->wait();
    } catch (...) {
    }
}

bool BatchUploader::may_grow(int64_t bytes) const {
  if (slots_.empty()) return true;
  return !device_.shares_host_memory() && (slots_.size() < kFewestBuffers || bytes_ + bytes <= kMaxBytes);
}

void BatchUploader::set_size(Slot& slot, int64_t bytes) {
  if (slot.buffer.bytes() >= bytes) return;
  CategoryScope scope(MemoryCategory::data);
  bytes_ += bytes - slot.buffer.bytes();
  slot.buffer = PinnedBuffer(device_, bytes);
}

BatchUploader::Slot& BatchUploader::next_slot(int64_t bytes) {
  if (next_ == slots_.size() && may_grow(bytes)) slots_.emplace_back();
  next_ %= slots_.size();
  Slot& slot = slots_[next_++];
  if (slot.copied && !slot.copied->done()) slot.copied->wait();
  set_size(slot, bytes);
  return slot;
}

void BatchUploader::reserve(const data::MicroBatch& batch, bool dropout_rows, int64_t count,
                            const MtpInputs& mtp) {
  const int64_t bytes = PackedBatch(batch, shard_, dropout_rows, mtp).bytes();
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    if (i == slots_.size() && !may_grow(bytes)) return;
    set_size(i == slots_.size() ? slots_.emplace_back() : slots_[i], bytes);
  }
}

PendingBatch BatchUploader::start(const data::MicroBatch& batch, bool dropout_rows, double loss_scale,
                                  const MtpInputs& mtp) {
  const PackedBatch packed(batch, shard_, dropout_rows, mtp);
  Slot& slot = next_slot(packed.bytes());
  if (!device_.is_meta()) packed.write(slot.buffer.host_write().data(), loss_scale);
  const Tensor buffer = device_buffer(device_, packed);
  // The memory may be that of a tensor which earlier work still uses.
  device_.wait_for(Queue::host_to_device, *device_.record(Queue::compute));
  QueueScope traced(device_, Queue::host_to_device);
  device_.start_copy_to_device(buffer.address(), slot.buffer.data(), packed.bytes(), Queue::host_to_device);
  traced.end("copy of a micro-batch");
  slot.copied = device_.record(Queue::host_to_device);
  return {device_, packed.views(buffer), slot.copied};
}

}  // namespace capstan::train
