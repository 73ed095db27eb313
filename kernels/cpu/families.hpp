// The kernel families of the CPU, each selected once for the instruction set of this machine.
#pragma once

#include "kernels/table.hpp"

namespace capstan::kernels {

const Gemm& cpu_gemm();
const Norm& cpu_norm();
const HeadNorm& cpu_head_norm();
const Activation& cpu_activation();
const Rope& cpu_rope();
const Attention& cpu_attention();
const AttentionSink& cpu_attention_sink();
const ContextAttention& cpu_context_attention();
const Embedding& cpu_embedding();
const Router& cpu_router();
const ExpertPermutation& cpu_expert_permutation();
const CrossEntropy& cpu_cross_entropy();
const Decoding& cpu_decoding();
const Elementwise& cpu_elementwise();
const Optimizers& cpu_optimizers();
const Adapter& cpu_adapter();
const Quantize& cpu_quantize();
const StepControlKernels& cpu_step_control();

}  // namespace capstan::kernels
