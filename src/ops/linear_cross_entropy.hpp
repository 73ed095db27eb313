#pragma once

#include "ops/tape.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::ops {

struct CrossEntropyResult {
  // fp32 [1]: sum over tokens of weight * loss, the root of the backward pass.
  Var sum;
  // fp64 [1]: the same, summed in double.
  Tensor exact_sum;
  // fp32 [N]: -log p(label), unweighted, without a gradient.
  Tensor per_token;
};

// The output layer fused with the loss, chunk by chunk over the rows: the logits[N, V] = x[N, h] W^T are
// never complete in memory. The device's kernels choose the rows of a chunk and the type of the logits.
// labels i32 [N], weights fp32 [N] (the loss mask, times a loss scale if any).
// Columns at or above `vocab` are padding and are ignored. softcap c > 0: the logits are c tanh(x W^T / c).
// Where the tape records, the forward step also computes the backward pass: it saves dx instead of logits and
// accumulates the weight gradient at once, for an upstream gradient of 1. The backward pass must therefore
// start with gradient 1 of `sum`. FLOPs: 6 N h V in F, none in B and W. Each tensor-parallel rank has V/T
// rows of W. The ranks combine maxima, sums of exponentials and label logits chunk by chunk (3 fp32 numbers
// per row); the losses are the same on every rank. x has all rows; its gradient is a partial sum, which
// copy_to_tensor_parallel completes.
CrossEntropyResult linear_cross_entropy(Tape& tape, const Var& x, const Parameter& weight,
                                        const Tensor& labels, const Tensor& weights, int64_t vocab,
                                        const TensorParallel& parallel = {}, float softcap = 0);

// The (capped) logits of x[N, h] without padding, fp32 [N, vocab], on every rank: for generation and small
// checks.
Tensor head_logits(Tape& tape, const Tensor& x, const Parameter& weight, int64_t vocab,
                   const TensorParallel& parallel = {}, float softcap = 0);

}  // namespace capstan::ops
