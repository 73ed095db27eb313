#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <vector>

#include "base/clock.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/gemm_arguments.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

namespace {

// oneDNN's threads are OpenMP's; this program is not built with it.
void set_openmp_threads(int threads) {
  if (const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads")))
    set(threads);
}

}  // namespace

double onednn_gemm_gflops(const NamedGemm& s, int threads, double seconds) {
  set_openmp_threads(threads);
  std::vector<float> a(static_cast<size_t>(s.m * s.k), 0.7f), b(static_cast<size_t>(s.n * s.k), 1.1f),
      c(static_cast<size_t>(s.m * s.n));
  double best = 1e30;
  const double start = steady_seconds();
  for (int i = 0; i < 2 || steady_seconds() - start < seconds; ++i) {
    const double before = steady_seconds();
    dnnl_sgemm(s.trans_a ? 'T' : 'N', s.trans_b ? 'T' : 'N', s.m, s.n, s.k, 1.0f, a.data(),
               s.trans_a ? s.m : s.k, b.data(), s.trans_b ? s.k : s.n, s.trans_a ? 1.0f : 0.0f, c.data(),
               s.n);
    best = std::min(best, steady_seconds() - before);
  }
  set_openmp_threads(1);
  return 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) / best * 1e-9;
}

namespace {

// Whether oneDNN's GEMM on the host is a peak of the device.
bool computes_on_host(const Device& device) {
  return device.type() == DeviceType::cpu || device.type() == DeviceType::checked;
}

}  // namespace

PeakMeasurement::PeakMeasurement(Device& on, DType type, double peak_gflops)
    : device_(&on), side_(is_accelerator(peak_gflops) ? 8192 : 2048) {
  host_.resize(static_cast<size_t>(side_ * side_));
  for (size_t i = 0; i < host_.size(); ++i) host_[i] = static_cast<float>(i % 1021) / 511.0f - 1.0f;
  input_ = Tensor::from_host<float>(on, {side_, side_}, host_);
  result_ = Tensor::zeros(on, {side_, side_});
  if (type != DType::f32) {
    const Tensor wide = std::move(input_);
    input_ = Tensor::empty(on, {side_, side_}, type);
    launch(on, on.table().elementwise->cast, wide, input_, side_ * side_);
  }
  on.synchronize();
  if (type != DType::f32 || !computes_on_host(on)) host_ = {};
  host_result_.resize(host_.size());
}

void PeakMeasurement::run() {
  const double start = steady_seconds();
  const int64_t n = side_;
  const GemmShape shape{false, false, n, n, n, n, n, n};
  const Gemm& kernel = *device_->table().gemm;
  const GemmTypes types{input_.dtype(), input_.dtype(), result_.dtype()};
  const double own = seconds_on(*device_, [&] {
    launch(*device_, kernel.run_workspace(shape, types, 1.0f, 0.0f), kernel.run, shape, input_, input_,
           result_, 1.0f, 0.0f, Tensor());
  });
  double onednn = own;
  if (!host_.empty()) {
    const double middle = steady_seconds();
    set_openmp_threads(device_->host_threads().size());
    dnnl_sgemm('N', 'N', n, n, n, 1.0f, host_.data(), n, host_.data(), n, 0.0f, host_result_.data(), n);
    set_openmp_threads(1);
    onednn = steady_seconds() - middle;
  }
  // The first run is not counted, because its memory is not in the caches.
  if (runs_++ > 0) own_ += own, onednn_ += onednn;
  spent_ += steady_seconds() - start;
}

double PeakMeasurement::gflops() const {
  const double flops = 2.0 * static_cast<double>(side_ * side_ * side_) * static_cast<double>(runs_ - 1);
  return runs_ > 1 ? flops / std::min(own_, onednn_) * 1e-9 : 0;
}

double peak_gemm_gflops(Device& device, DType type) {
  double best = 0;
  for (const NamedGemm& shape :
       {NamedGemm{"", false, false, 2048, 2048, 2048}, NamedGemm{"", false, true, 4096, 2304, 768},
        NamedGemm{"", false, false, 4096, 3072, 768}})
    best = std::max({best, gemm_gflops(device, shape, type, 0.3),
                     type == DType::f32 && computes_on_host(device)
                         ? onednn_gemm_gflops(shape, device.host_threads().size(), 0.3)
                         : 0});
  if (is_accelerator(best)) best = std::max(best, gemm_gflops(device, kAcceleratorGemm, type, 0.3));
  return best;
}

}  // namespace capstan::kernels
