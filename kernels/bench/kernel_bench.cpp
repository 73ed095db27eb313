#include "kernels/bench/kernel_bench.hpp"

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include "base/clock.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

double shortest_seconds(Device& device, double seconds, const std::function<void()>& run) {
  if (device.is_meta()) {
    run();
    return 1;
  }
  constexpr double kRow = 2e-3;
  double best = 1e30;
  int row = 1;
  const double start = steady_seconds();
  for (int i = 0; i < 2 || steady_seconds() - start < seconds; ++i) {
    const double taken = seconds_on(device,
                                    [&] {
                                      for (int j = 0; j < row; ++j) run();
                                    }) /
                         row;
    best = std::min(best, taken);
    if (device.queues_work() && taken * row < kRow)
      row = static_cast<int>(std::clamp(kRow / std::max(taken, 1e-6), 1.0, 1000.0));
  }
  return best;
}

Tensor noise(Device& device, int64_t n, DType dtype) {
  if (device.is_meta()) return Tensor::empty(device, {n}, dtype);
  // A thread of the host makes the values: arrays of GiB would take it longer than their kernel is measured.
  const int64_t period = std::min(n, int64_t{4} << 20);
  std::vector<float> values(static_cast<size_t>(period));
  uint32_t state = 1;
  for (float& v : values) v = static_cast<float>(static_cast<int32_t>(next_random(state))) * 0x1p-31f;
  Tensor made = Tensor::from_host<float>(device, {period}, values);
  if (dtype != DType::f32) {
    const Tensor wide = std::exchange(made, Tensor::empty(device, {period}, dtype));
    launch(device, device.table().elementwise->cast, wide, made, period);
  }
  if (n == period) return made;
  Tensor all = Tensor::empty(device, {n}, dtype);
  for (int64_t begin = 0; begin < all.bytes(); begin += made.bytes())
    device.copy(all.address() + begin, made.address(), std::min(made.bytes(), all.bytes() - begin));
  return all;
}

void KernelBench::run() {
  std::vector<BenchModel> models{{"gpt2-124m", 4, 1024, 12, 1, 64, 768, 3072, 50304, false},
                                 {"quickstart", 16, 128, 4, 2, 32, 256, 1024, 8192, true}};
  if (options_.large_model) models.push_back({kLargeModel, 1, 8192, 8, 4, 128, 4096, 14336, 128256, true});
  for (const BenchModel& m : models)
    for (const auto topic :
         {&KernelBench::attention, &KernelBench::attention_sink, &KernelBench::context_attention,
          &KernelBench::rope, &KernelBench::head_norm, &KernelBench::norms, &KernelBench::mlp,
          &KernelBench::experts, &KernelBench::expert_activation, &KernelBench::router,
          &KernelBench::cross_entropy, &KernelBench::sampling, &KernelBench::embedding,
          &KernelBench::quantize, &KernelBench::quantized_outputs, &KernelBench::low_precision_gemms,
          &KernelBench::adapters, &KernelBench::nf4})
      run_wanted([&](KernelBench& bench) { (bench.*topic)(m); });
  for (const auto topic :
       {&KernelBench::adam, &KernelBench::optimizers, &KernelBench::moments, &KernelBench::gradient_sums,
        &KernelBench::elementwise, &KernelBench::random_masks, &KernelBench::sums})
    run_wanted([&](KernelBench& bench) { (bench.*topic)(); });
}

void KernelBench::run_wanted(const Topic& topic) {
  if (device_.is_meta()) return topic(*this);
  const std::unique_ptr<Device> without_memory = make_meta_device(device_.table());
  KernelBenchOptions unreported = options_;
  unreported.report = nullptr;
  KernelBench names(*without_memory, unreported);
  topic(names);
  if (names.rates_.empty()) return;
  try {
    topic(*this);
  } catch (const std::exception& error) {
    // Of the arrays: no kernel of the topic that is left can be measured.
    if (!options_.report) throw;
    for (const KernelRate& kernel : names.rates_)
      if (std::ranges::none_of(rates_, [&](const KernelRate& row) { return row.name == kernel.name; }))
        add({.name = kernel.name, .peak = kernel.peak, .error = error.what()});
  }
}

void KernelBench::add(KernelRate kernel) {
  if (options_.report) options_.report(kernel);
  rates_.push_back(std::move(kernel));
}

void KernelBench::measure(KernelRate kernel, double work, double peak_rate,
                          const std::function<void()>& run) {
  if (!options_.wanted(kernel.name)) return;
  try {
    kernel.rate = work / shortest_seconds(device_, options_.seconds, run) * 1e-9;
    kernel.fraction_of_peak = kernel.rate / peak_rate;
  } catch (const std::exception& error) {
    if (!options_.report) throw;
    kernel.error = error.what();
  }
  add(std::move(kernel));
}

void KernelBench::bound_by_memory(std::string name, int64_t bytes, const std::function<void()>& run) {
  measure({std::move(name), Peak::copy}, static_cast<double>(bytes), options_.copy_gbps, run);
}

void KernelBench::bound_by_gemms(std::string name, double flops, const std::function<void()>& run) {
  measure({std::move(name), Peak::gemm}, flops, options_.gemm_gflops, run);
}

GemmOperand KernelBench::empty_operand(const QuantizeFormat& format, int64_t rows, int64_t cols) const {
  const int64_t codes = format.codes == DType::f4e2m1x2 ? ceil_div(cols, int64_t{2}) : cols;
  const Tensor one = Tensor::from_host<float>(device_, {1}, std::vector<float>{1});
  GemmOperand x{Tensor::zeros(device_, {rows, codes}, format.codes), one, {}, format.layout, cols};
  if (format.layout == ScaleLayout::tensor) return x;
  const BlockScales scales{format.layout, device_.table().scale_order, rows, cols};
  x.scale = Tensor::zeros(device_, {scales.elements()}, block_scale_type(format.layout));
  if (format.layout == ScaleLayout::block_1x16) x.tensor_scale = one;
  return x;
}

}  // namespace capstan::kernels
