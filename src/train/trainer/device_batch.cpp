#include "train/trainer/device_batch.hpp"

#include <algorithm>

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
// The bounds of all documents of all rows, one behind the other: cu_seqlens of the batch.
std::vector<int32_t> cumulative_lengths(const data::MicroBatch& batch) {
  std::vector<int32_t> bounds{0};
  for (size_t row = 0; row < batch.cu_seqlens.size(); ++row) {
    const auto first = static_cast<int32_t>(static_cast<int64_t>(row) * batch.sequence_length);
    for (size_t i = 1; i < batch.cu_seqlens[row].size(); ++i)
      bounds.push_back(first + batch.cu_seqlens[row][i]);
  }
  return bounds;
}
}  // namespace

models::Batch upload(Device& device, const data::MicroBatch& batch, bool dropout_rows, ContextShard shard) {
  const int64_t seq = batch.sequence_length;
  const std::vector<int64_t> here = shard.positions(seq);
  models::Batch result;
  result.batch = batch.rows;
  result.seq = static_cast<int64_t>(here.size());
  result.positions_end = seq;
  const int64_t n = result.batch * result.seq;
  CategoryScope scope(MemoryCategory::data);
  // value_of(sequence, position in it), for every token of this rank.
  const auto on_device = [&]<class T>(T, const auto& value_of) {
    std::vector<T> values;
    values.reserve(static_cast<size_t>(n));
    for (int64_t row = 0; row < batch.rows; ++row)
      for (const int64_t p : here) values.push_back(static_cast<T>(value_of(row, p)));
    return Tensor::from_host<T>(device, {n}, std::span<const T>(values));
  };
  const auto of = [&](const auto& all) {
    return [&all, seq](int64_t row, int64_t p) { return all[static_cast<size_t>(row * seq + p)]; };
  };
  result.tokens = on_device(int32_t{}, of(batch.tokens));
  result.labels = on_device(int32_t{}, of(batch.labels));
  result.loss_mask = on_device(float{}, of(batch.loss_mask));
  result.positions = on_device(int32_t{}, of(batch.position_ids));
  const bool packed = std::any_of(batch.cu_seqlens.begin(), batch.cu_seqlens.end(),
                                  [](const auto& c) { return c.size() > 2; });
  if (packed) {
    std::vector<int32_t> cu_seqlens = cumulative_lengths(batch);
    for (size_t i = 1; i < cu_seqlens.size(); ++i)
      result.max_seqlen = std::max(result.max_seqlen, int64_t{cu_seqlens[i]} - cu_seqlens[i - 1]);
    result.cu_seqlens =
        Tensor::from_host<int32_t>(device, {static_cast<int64_t>(cu_seqlens.size())}, cu_seqlens);
    result.document_start = on_device(int32_t{}, [&](int64_t row, int64_t p) {
      const auto& bounds = batch.cu_seqlens[static_cast<size_t>(row)];
      return *(std::upper_bound(bounds.begin(), bounds.end(), static_cast<int32_t>(p)) - 1);
    });
  }
  // (consumed-sample number, position in the sample): the same on every layout. 2^24 positions, 2^39 samples.
  if (dropout_rows)
    result.dropout_rows = on_device(int64_t{}, [&](int64_t row, int64_t p) {
      return static_cast<int64_t>(batch.sample_ids[static_cast<size_t>(row)] << 24) + p;
    });
  return result;
}

}  // namespace capstan::train
