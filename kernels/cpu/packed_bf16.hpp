// bf16 GEMMs on packed panels of both operands (amx_core.hpp): on the tile unit, or by AVX-512's instructions
// for bf16.
#pragma once

#include "kernels/gemm.hpp"

namespace capstan::kernels {

// True where the processor has one of the two, at the instruction set in use.
bool runs_packed_bf16();

// C = op(A) op(B) + beta C, beta 0 or 1; A and B bf16, C fp32 or bf16, sums in fp32. m, n and k are positive.
// `planned`: a shape that is at least as large, whose chunks and workspace are used; that of all groups for a
// group of a grouped GEMM. The tiling depends on the two shapes alone. Needs runs_packed_bf16().
void packed_bf16_gemm(Context& c, const GemmShape& planned, const GemmShape& s, In a, In b, Out out,
                      float beta);
WorkspaceSize packed_bf16_workspace(const GemmShape& planned, DType out);

}  // namespace capstan::kernels
