// The kernel families that `.cu` sources define, for the table of the device for which they are compiled.
#pragma once

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/notes.hpp"
#include "kernels/table.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

const Gemm& gemm_family();
const Elementwise& elementwise_family();
const Norm& norm_family();
const Activation& activation_family();
const StepControlKernels& step_control_family();
const Optimizers& optimizers_family();
const Embedding& embedding_family();
const Router& router_family();
const ExpertPermutation& expert_permutation_family();
const Rope& rope_family();
const CrossEntropy& cross_entropy_family();
const Attention& attention_family();
const AttentionSink& attention_sink_family();
const ContextAttention& context_attention_family();
const HeadNorm& head_norm_family();
const Decoding& decoding_family();
const Adapter& adapter_family();
const Quantize& quantize_family();

// The table of all families.
inline const Table& table_of_families() {
  static const Table table{.gemm = &gemm_family(),
                           .norm = &norm_family(),
                           .head_norm = &head_norm_family(),
                           .activation = &activation_family(),
                           .rope = &rope_family(),
                           .attention = &attention_family(),
                           .attention_sink = &attention_sink_family(),
                           .context_attention = &context_attention_family(),
                           .embedding = &embedding_family(),
                           .router = &router_family(),
                           .expert_permutation = &expert_permutation_family(),
                           .cross_entropy = &cross_entropy_family(),
                           .decoding = &decoding_family(),
                           .elementwise = &elementwise_family(),
                           .optimizers = &optimizers_family(),
                           .adapter = &adapter_family(),
                           .quantize = &quantize_family(),
                           .step_control = &step_control_family(),
                           .scale_order = ScaleOrder::tensor_core,
                           .next_note = next_note};
  return table;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
