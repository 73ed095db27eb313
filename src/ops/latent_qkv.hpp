// The operations between the projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and
// attention itself.
#pragma once

#include <algorithm>
#include <array>

#include "ops/heads.hpp"
#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// The first `width` columns of x [N, columns] and the others, each contiguous in new memory.
std::array<Var, 2> split_columns(Tape& tape, const Var& x, int64_t width);

// The heads of one rank: a query or key head has `nope_dim` elements without RoPE, then `rope_dim` with it; a
// value head has `value_dim`.
struct LatentHeads {
  int64_t heads = 0, nope_dim = 0, rope_dim = 0, value_dim = 0;
  int64_t qk_dim() const { return nope_dim + rope_dim; }
  // Packed QKV with a key head and a value head for each query head, each as wide as the widest; the elements
  // behind narrower ones are zero.
  kernels::QkvLayout layout() const { return {heads, 1, std::max(qk_dim(), value_dim)}; }
};

// Packed QKV [N, layout().row()] of the up-projections q [N, heads * qk_dim] and kv [N, heads * (nope_dim +
// value_dim)] (of each head the key's elements without RoPE, then its value) and of k_rope [N, rope_dim],
// which all heads share. The last rope_dim elements of queries and keys are rotated in pairs (2i, 2i + 1) by
// the angles of `positions` i32 [N]. Saves nothing; the gradient of k_rope is summed over the heads in fp32.
Var latent_qkv(Tape& tape, const Var& q, const Var& kv, const Var& k_rope, const LatentHeads& heads,
               const RopeTable& table, const Tensor& positions);

}  // namespace capstan::ops
