#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "support/paths.hpp"

namespace capstan::test {

// tests/support/gpu.cpp, in programs that have cases of the GPU.
[[gnu::weak]] bool runs_on_gpu();
[[gnu::weak]] std::string gpu_problem();
// tests/kernels/gpu_table.cpp, all of whose cases are of the GPU.
[[gnu::weak]] int run_cases(doctest::Context& context);

constinit const char* const kSourceDirectory = CAPSTAN_SOURCE_DIR;
constinit const char* const kBinaryDirectory = CAPSTAN_BINARY_DIR;

}  // namespace capstan::test

namespace {

// The processor features that the level of CAPSTAN_CPU needs and the system does not list. The program under
// test asks the processor itself: a level that is listed and refused fails the test.
std::string missing_features() {
  const char* const level = std::getenv("CAPSTAN_CPU");
  const std::map<std::string, std::string> needed{{"avx2", "avx2 fma bmi1 bmi2"},
                                                  {"avx512", "avx512f avx512vl avx512dq avx512bw avx512cd"},
                                                  {"amx", "avx512_bf16 amx_tile amx_bf16"}};
  const auto found = needed.find(level ? level : "");
  if (found == needed.end()) return {};
  std::ifstream processor("/proc/cpuinfo");
  std::string listed, missing;
  while (std::getline(processor, listed) && !listed.starts_with("flags")) {
  }
  listed += ' ';
  std::istringstream features(found->second);
  for (std::string feature; features >> feature;)
    if (listed.find(' ' + feature + ' ') == std::string::npos) missing += ' ' + feature;
  return missing;
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string missing = missing_features(); !missing.empty()) {
    std::printf("not run: this machine has no%s, which CAPSTAN_CPU=%s needs\n", missing.c_str(),
                std::getenv("CAPSTAN_CPU"));
    return 77;
  }
  doctest::Context context(argc, argv);
  if (capstan::test::runs_on_gpu) {
    const bool on_gpu = capstan::test::runs_on_gpu();
    if (const std::string problem = on_gpu ? capstan::test::gpu_problem() : ""; !problem.empty()) {
      std::printf("not run: %s\n", problem.c_str());
      return 77;
    }
    if (capstan::test::run_cases) return capstan::test::run_cases(context);
    if (on_gpu) context.addFilter("test-case", "*<capstan::test::Cuda>*,*every device*");
    if (!on_gpu) context.addFilter("test-case-exclude", "*<capstan::test::Cuda>*");
  }
  return context.run();
}
