#include "data/later_tokens.hpp"

#include <algorithm>
#include <numeric>

namespace capstan::data {

// Moves the values of a row to the left, within each document.
template <class T>
static void shift_row(const T* from, T* to, const std::vector<int32_t>& bounds, int64_t by) {
  for (size_t i = 1; i < bounds.size(); ++i) {
    const int64_t begin = bounds[i - 1], end = bounds[i];
    for (int64_t p = begin; p + by < end; ++p) to[p] = from[p + by];
  }
}

LaterTokens later_tokens(const MicroBatch& batch, int64_t by) {
  const int64_t length = batch.sequence_length;
  const auto elements = static_cast<size_t>(batch.rows * length);
  LaterTokens later{std::vector<int32_t>(elements), std::vector<int32_t>(elements),
                    std::vector<int32_t>(elements), std::vector<float>(elements)};
  for (int64_t row = 0; row < batch.rows; ++row) {
    const auto begin = static_cast<size_t>(row * length);
    std::vector<int32_t> bounds{0, static_cast<int32_t>(length)};
    if (!batch.cu_seqlens.empty()) bounds = batch.cu_seqlens[static_cast<size_t>(row)];
    shift_row(&batch.tokens[begin], &later.tokens[begin], bounds, by);
    shift_row(&batch.labels[begin], &later.labels[begin], bounds, by);
    shift_row(&batch.position_ids[begin], &later.position_ids[begin], bounds, by);
    shift_row(&batch.loss_mask[begin], &later.loss_mask[begin], bounds, by);
    const auto sum_of = [&](const std::vector<float>& mask) {
      const auto first = mask.begin() + row * length;
      return std::accumulate(first, first + length, 0.0);
    };
    const double before = sum_of(batch.loss_mask), after = sum_of(later.loss_mask);
    if (after == 0) continue;
    const auto first = later.loss_mask.begin() + row * length;
    std::transform(first, first + length, first,
                   [&](float weight) { return static_cast<float>(weight * (before / after)); });
  }
  return later;
}

}  // namespace capstan::data
