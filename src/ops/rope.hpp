#pragma once

#include "kernels/attention.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Cosines and sines of the rotary angles, fp32 [positions, rotary_dim / 2] (computed by nn/rope_table.hpp).
struct RopeTable {
  Tensor cos, sin;
  int64_t rotary_dim() const { return 2 * cos.size(1); }
  int64_t positions() const { return cos.size(0); }
};

// Rotates the query and key heads of packed QKV [N, row] by the angles of positions i32 [N], which are below
// table.positions(). Move qkv in to rotate it in place. The backward pass is the inverse rotation; saves
// nothing.
Var rope(Tape& tape, Var qkv, kernels::QkvLayout layout, const RopeTable& table, const Tensor& positions,
         bool interleaved);

}  // namespace capstan::ops
