#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "support/listener.hpp"
#include "support/paths.hpp"

namespace capstan::test {

// tests/support/gpu.cpp, in programs that have cases of the GPU.
[[gnu::weak]] bool runs_on_gpu();
[[gnu::weak]] std::string gpu_problem();
// tests/kernels/gpu_table.cpp and tests/support/several_gpus.cpp, all of whose cases are of the GPU.
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

int cases_begun = 0;
struct CaseCounter final : capstan::test::Listener {
  using Listener::Listener;
  void test_case_start(const doctest::TestCaseData&) override { ++cases_begun; }
};
REGISTER_LISTENER("count_cases", 2, CaseCounter);

// The cases of a GPU: a test without any has checked nothing.
int run_gpu_cases(doctest::Context& context) {
  const bool has_others = !capstan::test::run_cases;
  if (has_others) context.addFilter("test-case", "*<capstan::test::Cuda>*,*every device*");
  const int failed = has_others ? context.run() : capstan::test::run_cases(context);
  if (context.shouldExit() || cases_begun > 0) return failed;
  std::puts("no case has run on the GPU");
  return 1;
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
    if (on_gpu) return run_gpu_cases(context);
    context.addFilter("test-case-exclude", "*<capstan::test::Cuda>*");
  }
  return context.run();
}
