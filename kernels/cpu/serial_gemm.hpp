// The fp32 product on the calling thread, for tiles and for the blocks of attention.
#pragma once

#include <cstdint>

namespace capstan::kernels {

// C[m,n] = alpha * op(A) op(B) + beta * C, row-major; k > 0.
void serial_sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                  const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

}  // namespace capstan::kernels
