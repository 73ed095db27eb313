// RMSNorm inside packed QKV of a token's query heads as one vector, and of its key heads as another (norm.hpp normalizes each
// head by itself). The heads of a token may lie on several tensor-parallel ranks: each way is two kernels, the first for
// sums over the heads that are here, the second for what follows from the sums over all of them.
#pragma once

#include "kernels/attention.hpp"

namespace capstan::kernels {

struct HeadNormShape {
  QkvLayout qkv;  // heads that are here
  int64_t rows = 0;
  int64_t query_cols = 0, key_cols = 0;  // elements of a token's queries and keys on all ranks
  float gamma_offset = 0, eps = 0;       // as Norm's
  bool counts_keys = true;  // false: another rank that has the same keys answers for their squares
};

struct HeadNorm {
  // squares [rows, 2]: sums of x² over the queries that are here, and over the keys.
  void (*squares)(Context&, HeadNormShape, In qkv, float* squares);
  // y = x rstd (gamma + gamma_offset) with rstd = 1 / sqrt(squares / cols + eps), squares of all ranks; values are copied.
  // query_gamma [heads * head_dim], key_gamma [groups * head_dim]: of the heads that are here. y may be qkv.
  void (*forward)(Context&, HeadNormShape, In qkv, const float* squares, In query_gamma, In key_gamma, Out y);
  // dots [rows, 2]: sums of dy (gamma + gamma_offset) x rstd over the queries that are here, and over the keys, whose dy is
  // a part of a sum where ranks share them.
  void (*dots)(Context&, HeadNormShape, In dy, In qkv, const float* squares, In query_gamma, In key_gamma,
               float* dots);
  // dx from the dots of all ranks; those of values are copied. Where ranks share keys, dy is a part of a sum, and so is dx.
  // The gradients of gamma are fp32 and accumulated into (null: skipped). dx may be dy.
  void (*backward)(Context&, HeadNormShape, In dy, In qkv, const float* squares, const float* dots,
                   In query_gamma, In key_gamma, Out dx, float* dquery_gamma, float* dkey_gamma);
};

}  // namespace capstan::kernels
