#include "ops/decoding.hpp"

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Tensor positions_after(const Tensor& past, int64_t batch, int64_t tokens) {
  CategoryScope scope(MemoryCategory::data);
  Device& device = past.device();
  const Tensor positions = Tensor::empty(device, {batch * tokens}, DType::i32);
  launch(device, device.table().decoding->positions, past, batch, tokens, positions);
  return positions;
}

void advance(const Tensor& past, int64_t tokens) {
  launch(past.device(), past.device().table().decoding->advance, past, tokens);
}

Tensor sample_tokens(const Tensor& logits, int64_t columns, const kernels::SamplingOptions& options,
                     const Tensor& position) {
  CAPSTAN_ASSERT(logits.is_contiguous() && logits.rank() == 2 && columns > 0 && columns <= logits.size(1),
                 "sample_tokens: " + std::to_string(columns) + " columns of logits " + logits.text());
  Device& device = logits.device();
  const kernels::Decoding& kernel = *device.table().decoding;
  const int64_t rows = logits.size(0);
  CategoryScope scope(MemoryCategory::data);
  const Tensor tokens = Tensor::empty(device, {rows}, DType::i32);
  launch(device, kernel.sample_workspace(options, rows, columns), kernel.sample, options, logits, rows,
         columns, logits.size(1), position, tokens);
  return tokens;
}

}  // namespace capstan::ops
