#include "kernels/bench/bench.hpp"

#include <algorithm>

#include "base/clock.hpp"
#include "kernels/bench/kernel_bench.hpp"
#include "kernels/gemm_arguments.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"
#include "tensor/tensor.hpp"

namespace capstan::kernels {

double seconds_on(Device& device, const std::function<void()>& work) {
  if (!device.queues_work()) {
    const double before = steady_seconds();
    work();
    device.synchronize();
    return steady_seconds() - before;
  }
  const std::unique_ptr<Event> before = device.record_time(Queue::compute);
  work();
  const std::unique_ptr<Event> after = device.record_time(Queue::compute);
  device.synchronize();
  return after->time() - before->time();
}

bool is_accelerator(double gflops) {
  return gflops > 5e3;
}

double gemm_gflops(Device& device, const NamedGemm& s, DType dtype, double seconds) {
  const Tensor a = noise(device, s.m * s.k, dtype), b = noise(device, s.n * s.k, dtype),
               c = Tensor::zeros(device, {s.m * s.n});
  const GemmShape shape{s.trans_a, s.trans_b, s.m, s.n, s.k, s.trans_a ? s.m : s.k, s.trans_b ? s.k : s.n,
                        s.n};
  // A weight gradient (A transposed) adds to what is there.
  const Gemm& kernel = *device.table().gemm;
  const float beta = s.trans_a ? 1.0f : 0.0f;
  const double time = shortest_seconds(device, seconds, [&] {
    launch(device, kernel.run_workspace(shape, {dtype, dtype, DType::f32}, 1.0f, beta), kernel.run, shape, a,
           b, c, 1.0f, beta, Tensor());
  });
  return 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) / time * 1e-9;
}

DType cpu_gemm_type(DType compute) {
  return compute == DType::bf16 && cpu_features().native_bf16_gemm ? DType::bf16 : DType::f32;
}

double measured_gemm_gflops(Device& device, DType type) {
  // A sanitizer build is a hundred times slower; keep its benchmark short.
  double best = gemm_gflops(device, NamedGemm{"", false, false, 256, 256, 256}, type, 0.01);
  if (best < 3) return best;
  for (const NamedGemm& shape :
       {NamedGemm{"", false, true, 1024, 768, 768}, NamedGemm{"", false, false, 1024, 1024, 1024}})
    best = std::max(best, gemm_gflops(device, shape, type, 0.12));
  // Smaller than the largest of kAcceleratorGemm, because a training run may fill the memory of the GPU.
  if (is_accelerator(best))
    best = std::max(best, gemm_gflops(device, NamedGemm{"", false, true, 4096, 4096, 4096}, type, 0.12));
  return best;
}

double measured_copy_gbps(Device& device) {
  const auto rate_of = [&](int64_t n) {
    const Tensor a = noise(device, n), b = Tensor::zeros(device, {n});
    double time =
        shortest_seconds(device, 0.1, [&] { launch(device, device.table().elementwise->cast, a, b, n); });
    if (!device.shares_host_memory())
      time = std::min(
          time, shortest_seconds(device, 0.1, [&] { device.copy(b.address(), a.address(), a.bytes()); }));
    return 8.0 * static_cast<double>(n) / time * 1e-9;
  };
  const double rate = rate_of(16 << 20);
  // Beyond the cache of a GPU, which holds 64 MiB.
  return rate > 500 ? rate_of(256 << 20) : rate;
}

double kernel_latency_seconds(Device& device) {
  constexpr int64_t kFew = 256;
  const Tensor a = noise(device, kFew), b = Tensor::zeros(device, {kFew});
  return shortest_seconds(device, 0.02,
                          [&] { launch(device, device.table().elementwise->cast, a, b, kFew); });
}

std::vector<NamedGemm> named_gemms(bool large_model) {
  std::vector<NamedGemm> shapes{
      {"gpt2-124m qkv forward", false, true, 4096, 2304, 768},
      {"gpt2-124m qkv input gradient", false, false, 4096, 768, 2304},
      {"gpt2-124m qkv weight gradient", true, false, 2304, 768, 4096},
      {"gpt2-124m mlp up forward", false, true, 4096, 3072, 768},
      {"gpt2-124m mlp up weight gradient", true, false, 3072, 768, 4096},
      {"gpt2-124m mlp down forward", false, true, 4096, 768, 3072},
      {"gpt2-124m mlp down input gradient", false, false, 4096, 3072, 768},
      {"gpt2-124m mlp down weight gradient", true, false, 768, 3072, 4096},
      {"gpt2-124m head forward (1024 tokens)", false, true, 1024, 50304, 768},
      {"gpt2-124m head input gradient", false, false, 1024, 768, 50304},
      {"gpt2-124m head weight gradient", true, false, 50304, 768, 1024},
      {"quickstart qkv forward", false, true, 2048, 512, 256},
      {"quickstart mlp up forward", false, true, 2048, 1024, 256},
      {"quickstart mlp down forward", false, true, 2048, 256, 1024},
      {"quickstart mlp up input gradient", false, false, 2048, 256, 1024},
      {"quickstart mlp up weight gradient", true, false, 1024, 256, 2048},
      {"quickstart mlp down weight gradient", true, false, 256, 1024, 2048},
      {"quickstart head forward", false, true, 1024, 8192, 256},
      {"quickstart head weight gradient", true, false, 8192, 256, 1024},
  };
  static constexpr NamedGemm kLarge[] = {
      {"llama3-8b qkv forward", false, true, 8192, 6144, 4096},
      {"llama3-8b qkv weight gradient", true, false, 6144, 4096, 8192},
      {"llama3-8b mlp up forward", false, true, 8192, 28672, 4096},
      {"llama3-8b mlp up input gradient", false, false, 8192, 4096, 28672},
      {"llama3-8b mlp up weight gradient", true, false, 28672, 4096, 8192},
      {"llama3-8b mlp down forward", false, true, 8192, 4096, 14336},
      {"llama3-8b head forward (1024 tokens)", false, true, 1024, 128256, 4096},
  };
  if (large_model) shapes.insert(shapes.end(), std::begin(kLarge), std::end(kLarge));
  return shapes;
}

std::vector<KernelRate> measure_kernels(Device& device, const KernelBenchOptions& options) {
  KernelBench bench(device, options);
  bench.run();
  return bench.take();
}

std::vector<std::string> kernel_names() {
  const auto device = make_meta_device(cpu_table());
  std::vector<std::string> names;
  for (const NamedGemm& shape : named_gemms(true)) names.emplace_back(shape.name);
  for (KernelRate& kernel : measure_kernels(*device, {.seconds = 0, .large_model = true}))
    names.push_back(std::move(kernel.name));
  return names;
}

}  // namespace capstan::kernels
