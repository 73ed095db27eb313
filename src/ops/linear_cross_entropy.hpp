#pragma once

#include "ops/tape.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::ops {

struct CrossEntropyResult {
  Var sum;           // fp32 [1]: sum over tokens of weight * loss; what backward starts from
  Tensor exact_sum;  // f64 [1]: the same, summed in double
  Tensor per_token;  // fp32 [N]: -log p(label), unweighted, without a gradient
};

// The output layer and the loss in one, chunk by chunk over the rows: logits[N, V] = x[N, h] W^T never exist
// as a whole. labels i32 [N], weights fp32 [N] (the loss mask; scale it where a loss scale is wanted).
// Columns at or above `vocab` are padding and take no part. softcap c > 0: the logits are c tanh(x W^T / c).
//
// Where the tape records, this forward step also does the backward: dx is kept instead of logits, and the
// weight gradient is accumulated right away, for an upstream gradient of 1. Backward must therefore be
// started with 1 on `sum`. FLOPs: 6 N h V in F, none in B and W.
//
// Over tensor-parallel ranks each has V/T rows of W: the rows' maxima, sums of exponentials and labels' logits are
// combined chunk by chunk (3 fp32 numbers for a row), the losses are the same on every rank. x is all rows; its gradient is a
// part of a sum (copy_to_tensor_parallel makes it).
CrossEntropyResult linear_cross_entropy(Tape& tape, const Var& x, const Parameter& weight,
                                        const Tensor& labels, const Tensor& weights, int64_t vocab,
                                        const TensorParallel& parallel = {}, float softcap = 0);

// fp32 [N, vocab] logits of x[N, h] without padding, on every rank, capped alike: for generation and small checks.
Tensor head_logits(Tape& tape, const Tensor& x, const Parameter& weight, int64_t vocab,
                   const TensorParallel& parallel = {}, float softcap = 0);

// Rows of one chunk: enough to keep the accumulation of the weight gradient (its reading and writing V x h)
// cheap beside the products, few enough for the logits to stay within 256 MiB (384 MiB with a bf16 gradient, whose
// products are fast beside that accumulation); a multiple of 16, the same for all chunks but the last.
int64_t cross_entropy_chunk(int64_t rows, int64_t columns, bool narrow_gradient);

}  // namespace capstan::ops
