// bench_kernels [THREADS]: throughput of the CPU kernels on this machine. GEMMs beside oneDNN with all
// threads at once, the other kernels as fractions of the GEMM throughput or the copy bandwidth measured in
// the same run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"

int main(int argc, char** argv) {
  using namespace capstan;
  const int threads = argc > 1 ? std::atoi(argv[1]) : available_cores();
  const auto device = make_cpu_device(kernels::cpu_table(), threads);
  const double copy = kernels::measured_copy_gbps(*device), quick = kernels::measured_gemm_gflops(*device);
  std::printf("%s, %d threads; GEMMs %.1f GFLOP/s (quick measure), copy %.1f GB/s\n",
              kernels::cpu_features().instruction_set, threads, quick, copy);
  double peak = quick;
  std::printf("%-40s %6s %6s %6s %9s %9s %6s %9s\n", "GEMM, fp32 GFLOP/s", "m", "n", "k", "capstan", "oneDNN",
              "ratio", "bf16 in");
  for (const auto& s : kernels::named_gemms()) {
    const double theirs = kernels::onednn_gemm_gflops(s, threads, 0.3),
                 ours = kernels::gemm_gflops(*device, s, DType::f32, 0.3);
    const double narrow = kernels::gemm_gflops(*device, s, DType::bf16, 0.3);
    peak = std::max({peak, ours, theirs});
    std::printf("%-40s %6lld %6lld %6lld %9.1f %9.1f %6.2f %9.1f\n", s.name, static_cast<long long>(s.m),
                static_cast<long long>(s.n), static_cast<long long>(s.k), ours, theirs, ours / theirs,
                narrow);
  }
  std::printf("best GEMM throughput %.1f GFLOP/s\n%-46s %9s %14s\n", peak, "kernel, fp32", "rate",
              "of the peak");
  for (const auto& r : kernels::measure_kernels(*device, {.gemm_gflops = peak, .copy_gbps = copy}))
    std::printf("%-46s %9.1f %-8s %5.2f\n", r.name.c_str(), r.rate,
                r.peak == kernels::Peak::gemm ? "GFLOP/s" : "GB/s", r.fraction_of_peak);
}
