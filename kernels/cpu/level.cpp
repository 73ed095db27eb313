#include "kernels/cpu/level.hpp"

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace capstan::kernels {

namespace {

// The CPU features that Highway requires for its AVX2 and AVX3 targets, checked with the compiler's builtin
// (which includes operating-system support). Linking libhwy for this would calibrate a timer at every start
// of the program, 5 ms before main.
#if defined(__x86_64__)
// Does not test for F16C, which every CPU with these features has and some compilers cannot test for.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd");
}
#else
bool has_avx2() {
  return false;
}
bool has_avx512() {
  return false;
}
#endif

#if defined(__x86_64__) && defined(__linux__)
bool has_amx() {
  if (!has_avx512() || !__builtin_cpu_supports("avx512bf16")) return false;
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((d & kBf16) == 0 || (d & kTile) == 0) return false;
  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool has_amx() {
  return false;
}
#endif

struct Name {
  const char *word, *text;
  bool (*present)();
};
constexpr std::array<Name, 4> kLevels{{{"sse4", "SSE4.2", [] { return true; }},
                                       {"avx2", "AVX2", has_avx2},
                                       {"avx512", "AVX-512", has_avx512},
                                       {"amx", "AMX", has_amx}}};

CpuLevel find_level() {
  const char* const wanted = std::getenv("CAPSTAN_CPU");
  if (!wanted || !*wanted) return best_cpu_level();
  const std::string setting = std::string("environment variable CAPSTAN_CPU=") + wanted;
  for (size_t i = 0; i < kLevels.size(); ++i) {
    if (kLevels[i].word != std::string_view(wanted)) continue;
    if (!kLevels[i].present())
      fail(ErrorCode::usage, setting + ": this machine has no " + kLevels[i].text,
           "unset it to use the best instruction set of this machine");
    return static_cast<CpuLevel>(i);
  }
  fail(ErrorCode::usage, setting + " is not an instruction set", "one of sse4, avx2, avx512, amx");
}

}  // namespace

CpuLevel best_cpu_level() {
  size_t best = kLevels.size() - 1;
  while (!kLevels[best].present()) --best;
  return static_cast<CpuLevel>(best);
}

CpuLevel cpu_level() {
  static const CpuLevel level = find_level();
  return level;
}

const char* text(CpuLevel level) {
  return kLevels[static_cast<size_t>(level)].text;
}

}  // namespace capstan::kernels
