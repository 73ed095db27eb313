// GEMM by oneDNN's matmul primitive on the calling thread, for processors with native bf16 multiplication
// (AVX-512 BF16, AMX). On others oneDNN 2.6 has no bf16 GEMM, or emulates it.
#pragma once

#include "kernels/gemm.hpp"

namespace capstan::kernels {

// "AVX-512 bf16" or "AMX bf16" where the processor multiplies bf16 and oneDNN supports it; else "".
const char* native_bf16();

// C = A B + beta C for one tile, beta 0 or 1; A and B of one type. Addresses are those of the tile's corner.
// workspace: onednn_workspace() bytes, 64-byte aligned. Returns false when oneDNN has no implementation for
// the types.
bool onednn_gemm(const GemmShape& shape, In a, In b, Out c, float beta, void* workspace);
// Bytes that the primitive for this tile needs beside its operands (oneDNN: scratchpad); 0 where there is
// none.
size_t onednn_workspace(const GemmShape& shape, DType in, DType out, float beta);

}  // namespace capstan::kernels
