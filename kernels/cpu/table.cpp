// The CPU's table of kernels and what this machine offers them.
#include "kernels/table.hpp"

#include "kernels/cpu/families.hpp"
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
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return {"AVX-512", false};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"AVX2", false};
  return {"SSE4.2", false};
}

}  // namespace capstan::kernels
