// The CPU's table of kernels, and the CPU features that they use.
#include "kernels/table.hpp"

#include <algorithm>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/level.hpp"
#include "kernels/cpu/onednn.hpp"

namespace capstan::kernels {

const Table& cpu_table() {
  static const Table table{.gemm = &cpu_gemm(),
                           .norm = &cpu_norm(),
                           .head_norm = &cpu_head_norm(),
                           .activation = &cpu_activation(),
                           .rope = &cpu_rope(),
                           .attention = &cpu_attention(),
                           .attention_sink = &cpu_attention_sink(),
                           .context_attention = &cpu_context_attention(),
                           .embedding = &cpu_embedding(),
                           .router = &cpu_router(),
                           .expert_permutation = &cpu_expert_permutation(),
                           .cross_entropy = &cpu_cross_entropy(),
                           .decoding = &cpu_decoding(),
                           .elementwise = &cpu_elementwise(),
                           .optimizers = &cpu_optimizers(),
                           .adapter = &cpu_adapter(),
                           .quantize = &cpu_quantize(),
                           .step_control = &cpu_step_control()};
  return table;
}

CpuFeatures cpu_features() {
  if (*native_bf16()) return {native_bf16(), true};
  return {text(std::min(cpu_level(), CpuLevel::avx512)), false};
}

}  // namespace capstan::kernels
