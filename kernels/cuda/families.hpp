// The kernel families that `.cu` sources define, for the table of the device for which they are compiled.
#pragma once

#include "kernels/cuda/device.hpp"
#include "kernels/table.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

const Gemm& gemm_family();
const Elementwise& elementwise_family();
const Norm& norm_family();
const Activation& activation_family();
const StepControlKernels& step_control_family();
const Optimizers& optimizers_family();
const Embedding& embedding_family();
const Rope& rope_family();
const CrossEntropy& cross_entropy_family();

// All of them. Families that are not written yet are null.
inline const Table& table_of_families() {
  static const Table table{.gemm = &gemm_family(),
                           .norm = &norm_family(),
                           .head_norm = nullptr,
                           .activation = &activation_family(),
                           .rope = &rope_family(),
                           .attention = nullptr,
                           .context_attention = nullptr,
                           .embedding = &embedding_family(),
                           .cross_entropy = &cross_entropy_family(),
                           .decoding = nullptr,
                           .elementwise = &elementwise_family(),
                           .optimizers = &optimizers_family(),
                           .adapter = nullptr,
                           .quantize = nullptr,
                           .step_control = &step_control_family(),
                           .scale_order = ScaleOrder::tensor_core};
  return table;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
