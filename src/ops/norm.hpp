#pragma once

#include "kernels/heads.hpp"
#include "ops/tape.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::ops {

struct NormOptions {
  // RMSNorm, else LayerNorm.
  bool rms = false;
  float epsilon = 1e-5f;
  // 1 where gamma is stored as gamma - 1.
  float gamma_offset = 0;
};

struct NormResult {
  // x + residual; x itself without a residual.
  Var sum;
  // The normalized sum.
  Var y;
};

// The residual addition and the norm that follows it, in one pass: y = norm(x + residual) * gamma (+ beta)
// over the last dimension of [N, h]. An undefined residual means no addition. Move x in, so that the sum
// overwrites it. Use `sum` as the next residual (also without a residual here), so that the norm's backward
// kernel adds its gradient. `reader`: the weight of the linear layer that reads y as it is, for which the
// same launch quantizes y; null: none.
NormResult norm(Tape& tape, Var x, const Var& residual, const Parameter& gamma, const Parameter* beta,
                NormOptions options, const Parameter* reader = nullptr);

// The number of heads on all tensor-parallel ranks together.
struct HeadCounts {
  // Query heads, key heads.
  int64_t heads = 0, groups = 0;
};

// RMSNorm of a token's query heads as one vector and of its key heads as another, in packed QKV [N, row];
// copies the values. query_gamma [heads * head_dim] and key_gamma [groups * head_dim] cover the local heads.
// Over T tensor-parallel ranks two fp32 sums of each token are all-reduced forward and two backward; keys
// that several ranks hold count once, and their gradients are partial sums.
Var norm_across_heads(Tape& tape, const Var& qkv, kernels::QkvLayout layout, HeadCounts all,
                      const Parameter& query_gamma, const Parameter& key_gamma, NormOptions options,
                      const TensorParallel& parallel);

}  // namespace capstan::ops
