// Generation token by token. Values that change from step to step stay on the device, so that a step needs no
// value of the host.
#pragma once

#include "kernels/decoding.hpp"
#include "tensor/tensor.hpp"

namespace capstan::ops {

// `past`: i32 [1], the number of cached tokens of each sequence.

// Positions i32 [batch * tokens] of new tokens that follow the cached ones.
Tensor positions_after(const Tensor& past, int64_t batch, int64_t tokens);
// past += tokens.
void advance(const Tensor& past, int64_t tokens);

// One token for each row of logits, fp32 [rows, vocab], among its first `columns`: i32 [rows], -1 where
// logits are not finite. The draw is that of `position`, i32 [1].
Tensor sample_tokens(const Tensor& logits, int64_t columns, const kernels::SamplingOptions& options,
                     const Tensor& position);

}  // namespace capstan::ops
