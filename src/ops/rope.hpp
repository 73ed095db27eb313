// QK norm and RoPE: the transform of queries and keys between their projection and attention.
#pragma once

#include "kernels/rope.hpp"
#include "ops/heads.hpp"
#include "ops/norm.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Cosines and sines of the rotary angles, fp32 [positions, rotary_dim / 2] (computed by nn/rope_table.hpp).
struct RopeTable {
  Tensor cos, sin;
  int64_t rotary_dim() const { return cos.defined() ? 2 * cos.size(1) : 0; }
  int64_t positions() const { return cos.size(0); }
};

// [head_dim] each; null: no such parameter. Betas only with LayerNorm.
struct QkNormParameters {
  const Parameter* q_gamma = nullptr;
  const Parameter* q_beta = nullptr;
  const Parameter* k_gamma = nullptr;
  const Parameter* k_beta = nullptr;
};

// Part of the attention operations, which apply it to packed QKV before attention and undo it in the backward
// pass; it saves nothing itself. First the norm of each query head and key head, then the rotation by the
// angles of `positions` i32 [N], which are below table.positions(). Each of both is optional; values do not
// change.
struct QueryKeyTransform {
  RopeTable table;
  Tensor positions;
  bool interleaved = false;
  QkNormParameters norm;
  NormOptions norm_options;

  bool normalizes() const { return norm.q_gamma != nullptr; }
  bool rotates() const { return table.rotary_dim() > 0; }
  bool is_identity() const { return !normalizes() && !rotates(); }
  // Parameters for which backward() computes gradients.
  std::vector<const Parameter*> parameters() const;
  void check(const Tensor& qkv, const kernels::QkvLayout& layout) const;

  // Transformed heads of `from` in `to`, which may be the same heads. One launch.
  void apply(StepContext& context, const kernels::QkvLayout& layout, const QkvHeads& from,
             const QkvHeads& to) const;
  // Turns the gradient of the transformed heads into that of qkv [N, row], in place, and schedules the
  // gradients of the parameters. qkv: as it was before `apply`; only read with a norm.
  void backward(BackwardContext& ctx, const kernels::QkvLayout& layout, const Tensor& qkv,
                const Tensor& dqkv) const;
  // Read and written forward and backward, for N rows of packed QKV with that many bytes.
  Cost cost(const kernels::QkvLayout& layout, int64_t qkv_bytes) const;
  Cost backward_cost(const kernels::QkvLayout& layout, int64_t qkv_bytes) const;

 private:
  kernels::RopeShape shape(const kernels::QkvLayout& layout, int64_t rows) const;
};

}  // namespace capstan::ops
