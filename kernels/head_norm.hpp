// RMSNorm, in packed QKV, of a token's query heads as one vector and of its key heads as another (norm.hpp
// normalizes each head by itself). The heads may be sharded over tensor-parallel ranks: each pass has two
// kernels, one for the sums over local heads, one that uses the sums over all heads.
#pragma once

#include "kernels/heads.hpp"

namespace capstan::kernels {

struct HeadNormShape {
  // Local heads.
  QkvLayout qkv;
  int64_t rows = 0;
  // Elements of a token's queries and keys on all ranks.
  int64_t query_cols = 0, key_cols = 0;
  // Same meaning as in Norm.
  float gamma_offset = 0, eps = 0;
  // False: another rank with the same keys adds their squares.
  bool counts_keys = true;
};

struct HeadNorm {
  // squares [rows, 2]: sums of x² over the local queries, and over the keys.
  void (*squares)(Context&, HeadNormShape, In qkv, float* squares);
  // y = x rstd (gamma + gamma_offset) with rstd = 1 / sqrt(squares / cols + eps), squares of all ranks;
  // copies the values. query_gamma [heads * head_dim], key_gamma [groups * head_dim]: of the local heads. y
  // may be qkv.
  void (*forward)(Context&, HeadNormShape, In qkv, const float* squares, In query_gamma, In key_gamma, Out y);
  // dots [rows, 2]: sums of dy (gamma + gamma_offset) x rstd over the local queries, and over the keys, whose
  // dy is a partial sum where ranks share them.
  void (*dots)(Context&, HeadNormShape, In dy, In qkv, const float* squares, In query_gamma, In key_gamma,
               float* dots);
  // dx from the dots of all ranks; copies the gradients of values. Where ranks share keys, dy and dx are
  // partial sums. The gradients of gamma are fp32 and accumulated into (null: skipped). dx may be dy.
  void (*backward)(Context&, HeadNormShape, In dy, In qkv, const float* squares, const float* dots,
                   In query_gamma, In key_gamma, Out dx, float* dquery_gamma, float* dkey_gamma);

  WorkspaceSize (*forward_workspace)(HeadNormShape);
  WorkspaceSize (*dots_workspace)(HeadNormShape);
  // parameter_gradients: a gradient of gamma is given.
  WorkspaceSize (*backward_workspace)(HeadNormShape, bool parameter_gradients);
};

}  // namespace capstan::kernels
