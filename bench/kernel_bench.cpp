// bench_kernels [THREADS]: what the CPU kernels reach on this machine. Products beside oneDNN with all threads at once, the
// other kernels as shares of the product rate or the copy bandwidth measured in the same run.
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double onednn_gflops(const capstan::kernels::ProductShape& s, double seconds) {
  std::vector<float> a(static_cast<size_t>(s.m * s.k), 0.7f), b(static_cast<size_t>(s.n * s.k), 1.1f),
      c(static_cast<size_t>(s.m * s.n));
  double best = 1e30;
  const double start = now();
  for (int i = 0; i < 2 || now() - start < seconds; ++i) {
    const double before = now();
    dnnl_sgemm(s.trans_a ? 'T' : 'N', s.trans_b ? 'T' : 'N', s.m, s.n, s.k, 1.0f, a.data(),
               s.trans_a ? s.m : s.k, b.data(), s.trans_b ? s.k : s.n, s.trans_a ? 1.0f : 0.0f, c.data(),
               s.n);
    best = std::min(best, now() - before);
  }
  return 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) / best * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace capstan;
  const int threads = argc > 1 ? std::atoi(argv[1]) : available_cores();
  if (const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads")))
    set(threads);
  const auto device = make_cpu_device(kernels::cpu_table(), threads);
  const double copy = kernels::measured_copy_gbps(*device), quick = kernels::measured_gemm_gflops(*device);
  std::printf("%s, %d threads; products %.1f GFLOP/s (quick measure), copy %.1f GB/s\n",
              kernels::cpu_features().instruction_set, threads, quick, copy);
  double roof = quick;
  std::printf("%-40s %6s %6s %6s %9s %9s %6s %9s\n", "product, fp32 GFLOP/s", "m", "n", "k", "capstan",
              "oneDNN", "ratio", "bf16 in");
  for (const auto& s : kernels::product_shapes()) {
    const double theirs = onednn_gflops(s, 0.3), ours = kernels::product_gflops(*device, s, DType::f32, 0.3);
    const double narrow = kernels::product_gflops(*device, s, DType::bf16, 0.3);
    roof = std::max({roof, ours, theirs});
    std::printf("%-40s %6lld %6lld %6lld %9.1f %9.1f %6.2f %9.1f\n", s.name, static_cast<long long>(s.m),
                static_cast<long long>(s.n), static_cast<long long>(s.k), ours, theirs, ours / theirs,
                narrow);
  }
  std::printf("best product rate %.1f GFLOP/s\n%-46s %9s %14s\n", roof, "kernel, fp32", "rate",
              "share of roof");
  for (const auto& r : kernels::measure_kernels(*device, roof, copy))
    std::printf("%-46s %9.1f %-8s %5.2f\n", r.name.c_str(), r.rate,
                r.roof == kernels::Roof::gemm ? "GFLOP/s" : "GB/s", r.share);
}
