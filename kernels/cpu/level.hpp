// The instruction sets that the CPU kernels choose from. Each level includes those before it.
#pragma once

namespace capstan::kernels {

enum class CpuLevel { sse4, avx2, avx512, amx };

// The highest level that this processor and system support.
CpuLevel best_cpu_level();
// That level, or the one that the environment variable CAPSTAN_CPU names. Determined once. Throws
// ErrorCode::usage for an unknown name and for a level that this machine lacks.
CpuLevel cpu_level();

inline bool runs(CpuLevel level) {
  return cpu_level() >= level;
}

// "SSE4.2", "AVX2", "AVX-512", "AMX".
const char* text(CpuLevel level);

}  // namespace capstan::kernels
