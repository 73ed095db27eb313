#pragma once

#include "kernels/attention.hpp"
#include "ops/tape.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::ops {

struct NormOptions {
  bool rms = false;  // RMSNorm, else LayerNorm
  float epsilon = 1e-5f;
  float gamma_offset = 0;  // 1 where gamma is stored as gamma - 1
};

struct NormResult {
  Var sum;  // x + residual; x itself without a residual
  Var y;    // the normalized sum
};

// The residual addition and the norm that follows it, in one pass: y = norm(x + residual) * gamma (+ beta)
// over the last dimension of [N, h]. An undefined residual is none. Move x in: its memory then takes the sum.
// Whoever goes on with the residual stream uses `sum` (also without a residual), so that its gradient is
// added within the norm's backward kernel.
NormResult norm(Tape& tape, Var x, const Var& residual, const Parameter& gamma, const Parameter* beta,
                NormOptions options);

// Normalizes each query and each key head of packed QKV [N, row] over head_dim; values pass. gammas
// [head_dim]; betas only with LayerNorm.
struct QkNormParameters {
  const Parameter* q_gamma = nullptr;
  const Parameter* q_beta = nullptr;
  const Parameter* k_gamma = nullptr;
  const Parameter* k_beta = nullptr;
};
Var qk_norm(Tape& tape, const Var& qkv, kernels::QkvLayout layout, const QkNormParameters& parameters,
            NormOptions options);

// The heads that the norms see, on all tensor-parallel ranks together.
struct AllHeads {
  int64_t heads = 0, groups = 0;  // of queries; of keys
};

// RMSNorm of a token's query heads as one vector and of its key heads as another, in packed QKV [N, row]; values pass.
// query_gamma [heads * head_dim] and key_gamma [groups * head_dim] have the heads that are here. Over T tensor-parallel ranks
// two fp32 sums of each token are all-reduced forward and two backward; keys that several ranks hold count once, and their
// gradients are parts of a sum as those of the keys are.
Var norm_across_heads(Tape& tape, const Var& qkv, kernels::QkvLayout layout, AllHeads all,
                      const Parameter& query_gamma, const Parameter& key_gamma, NormOptions options,
                      const TensorParallel& parallel);

}  // namespace capstan::ops
