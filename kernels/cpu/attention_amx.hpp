// The functions of attention on the tile unit (attention_block-inl.hpp, Tiles). Panels and steps are those of
// amx_core.hpp; their arrays are aligned to 64 bytes. Needs runs_amx().
#pragma once

#include <cstdint>

#include "tensor/dtype.hpp"

namespace capstan::kernels::amx {

// The kind of panels: rows of the left operand or columns of the right one, each a row or a column of the
// array.
enum class Panels { rows, rows_of_columns, columns, columns_of_rows };
// n rows (columns) with a depth of k; `stride` values from panel to panel. Zeros pad both to multiples of 32.
void pack(Panels panels, const bf16* from, int64_t ld, int64_t n, int64_t k, bf16* to, int64_t stride);

// sums[32][32] (+)= one panel times another; the depth is a multiple of 32. The caller holds a TileConfig
// (amx.hpp).
void gemm(const bf16* a, const bf16* b, int64_t depth, bool add, float* sums, int64_t ld);

// sums += (a + rest) b, and sums += a (b + rest).
void gemm_split_a(const bf16* a, const bf16* rest, const bf16* b, int64_t depth, float* sums, int64_t ld);
void gemm_split_b(const bf16* a, const bf16* b, const bf16* rest, int64_t depth, float* sums, int64_t ld);

// A left panel of s[rows][depth] rounded, rows <= 32; zeros pad it to 32 rows. depth is a multiple of 32. If
// `rest` is given, a second panel there holds the rounded rounding errors: both together have 16 bits of s.
void pack_rounded_rows(const float* s, int64_t ld, int64_t rows, int64_t depth, bf16* to, bf16* rest);
// The same for a right panel of s[depth][32]; zeros pad its depth to a multiple of 32.
void pack_rounded_columns(const float* s, int64_t ld, int64_t depth, bf16* to, bf16* rest);

// 32 rows of scores over `width` keys, a multiple of 32 up to 128, rows of `ld` floats. Keys [from[i], to[i])
// are visible to row i; `full`: all keys to all rows. Logits are scores times scale > 0.
struct ScoreRows {
  const float* scores;
  int64_t ld, width;
  const int64_t *from, *to;
  bool full;
  float scale;
};
// Updates the running maximum of 32 rows of logits and the running sum of their exponentials; correction[i]
// rescales row i to a new maximum. Writes the exponentials as a left panel and its rest. Returns whether any
// correction is not 1.
bool softmax_rows(const ScoreRows& rows, float* max, float* sum, float* correction, bf16* weights,
                  bf16* rest);

// P = exp(logit - lse) and dS = P (dP - delta) of the same rows, dP with the rows of the scores. dS as a left
// panel; P, with its rest, and dS as right panels of 32 keys, `panel` values apart, whose depth are the rows.
void score_gradient_rows(const ScoreRows& rows, const float* dp, const float* lse, const float* delta,
                         bf16* ds_rows, bf16* p_columns, bf16* p_rest, bf16* ds_columns, int64_t panel);

// to[32][n] from n / 32 blocks [32 of n][32].
void transpose_sums(const float* blocks, int64_t n, float* to);

}  // namespace capstan::kernels::amx
