#include "data/sample.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::data {

void fill_row(std::span<const int32_t> text, const DocumentOptions& options, const RowView& row) {
  const size_t length = row.tokens.size();
  CAPSTAN_ASSERT(text.size() == length + 1, "a sample has one token more than the sequence");
  std::copy_n(text.begin(), length, row.tokens.begin());
  std::copy_n(text.begin() + 1, length, row.labels.begin());
  row.cu_seqlens->assign(1, 0);
  int32_t position = 0;
  for (size_t i = 0; i < length; ++i) {
    const bool end = options.eod && row.tokens[i] == *options.eod;
    row.loss_mask[i] = end && options.eod_mask_loss ? 0.0f : 1.0f;
    row.position_ids[i] = position++;
    if (!end) continue;
    if (options.reset_position_ids) position = 0;
    if (options.reset_attention_mask && i + 1 < length)
      row.cu_seqlens->push_back(static_cast<int32_t>(i + 1));
  }
  row.cu_seqlens->push_back(static_cast<int32_t>(length));
}

}  // namespace capstan::data
