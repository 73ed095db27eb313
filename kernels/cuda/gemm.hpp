// The parts of the GEMM family that are kernels of their own.
#pragma once

#include "kernels/cuda/device.hpp"
#include "kernels/gemm.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// ---- gemm_passes.cu

// Content of C before the bias: C as it is, or values + beta * C.
struct GemmResult {
  bool replaces = false;
  // fp32 [rows of C, n] without gaps; null: zeros.
  const float* values = nullptr;
  float beta = 0;
};
// Stores the result and the bias in the C of all GEMMs of the batch, in one pass.
void finish_result(Context& c, const GemmShape& s, Out out, const GemmResult& result, In bias);
// As Gemm::column_sum.
void column_sum(Context& c, In x, float* out, int64_t rows, int64_t cols, int64_t row_stride,
                bool accumulate);
WorkspaceSize column_sum_workspace(int64_t rows, int64_t cols);

// ---- gemm_tiles.cu: all types of Gemm::run and Gemm::run_grouped

void run_tiles(Context& c, const GemmShape& s, const Operand& a, const Operand& b, Out out, float alpha,
               float beta);
void run_grouped_tiles(Context& c, GemmShape s, GemmGroups groups, const int64_t* sizes, int64_t count,
                       Operand a, Operand b, Out out, float alpha, float beta, In bias);

}  // namespace capstan::kernels::CAPSTAN_GPU
