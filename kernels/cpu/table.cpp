// The CPU's table of kernels and what this machine offers them.
#include "kernels/table.hpp"

#include <algorithm>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/level.hpp"
#include "kernels/cpu/onednn.hpp"

namespace capstan::kernels {

const Table& cpu_table() {
  static const Table table{&cpu_gemm(),       &cpu_norm(),          &cpu_head_norm(),
                           &cpu_activation(), &cpu_attention(),     &cpu_context_attention(),
                           &cpu_embedding(),  &cpu_cross_entropy(), &cpu_elementwise(),
                           &cpu_optimizers(), &cpu_adapter()};
  return table;
}

CpuFeatures cpu_features() {
  if (*native_bf16()) return {native_bf16(), true};
  return {text(std::min(cpu_level(), CpuLevel::avx512)), false};
}

}  // namespace capstan::kernels
