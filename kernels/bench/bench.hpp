// Throughput of the kernels on this machine: the measured peaks for logs and `capstan bench`, and each
// kernel's fraction of the peak that bounds it.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/device.hpp"
#include "tensor/tensor.hpp"

namespace capstan::kernels {

// The type in which the CPU's kernels multiply operands of type `compute`: fp32 where they are widened.
DType cpu_gemm_type(DType compute);

// Runs `work`, waits until the device has done it, and returns its time in seconds. On a device with queues
// this is the time between two events of the compute queue.
double seconds_on(Device& device, const std::function<void()>& work);

// Whether this is the GEMM throughput of an accelerator, which needs larger GEMMs for its peak.
bool is_accelerator(double gflops);

// GEMM throughput of that type in GFLOP/s (2mnk FLOPs each): the best of a few medium shapes, in about 0.3 s.
// The reference of a training step's `gemm%`.
double measured_gemm_gflops(Device& device, DType type = DType::f32);

// The rate of a copy of 64 MiB (of 1 GiB on a GPU, whose cache is larger), bytes read plus bytes written, in
// GB/s: the best within about 0.1 s. Copies with the kernel `cast`; on a device with memory of its own also
// with Device::copy (cudaMemcpyAsync), and the faster one counts, so that the reference is not this program's
// own kernel alone.
double measured_copy_gbps(Device& device);

// The shortest time of a kernel on few numbers: what a kernel takes in addition to its work.
double kernel_latency_seconds(Device& device);

enum class Peak : uint8_t { gemm, copy };
struct KernelRate {
  // "attention forward 4x1024x12x64".
  std::string name;
  // The peak that bounds this kernel.
  Peak peak;
  // GFLOP/s or GB/s.
  double rate = 0;
  double fraction_of_peak = 0;
  // Why it could not be measured.
  std::string error = {};
};
// The measurements of measure_kernels(), and the peaks that they are compared with.
struct KernelBenchOptions {
  // The type of attention, whose GEMM throughput is gemm_gflops.
  DType attention = DType::f32;
  // The type of activations in the other kernels. Those of the optimizer and of the logits are fp32.
  DType activations = DType::f32;
  double gemm_gflops = 1, copy_gbps = 1;
  // Measuring time of each kernel, roughly.
  double seconds = 0.3;
  // Also the shapes of kLargeModel, whose arrays do not fit into the cache of a GPU: several GB.
  bool large_model = false;
  // Selects kernels by their names.
  std::function<bool(std::string_view)> wanted = [](std::string_view) { return true; };
  // Gets each row once it is measured. Where it is given, a kernel that fails is a row with its error, and
  // the others are measured.
  std::function<void(const KernelRate&)> report = {};
};
// The shapes of Llama 3 8B at 1 x 8192 tokens.
inline constexpr const char* kLargeModel = "llama3-8b";
// One row for each wanted kernel at the shapes of each model: GPT-2 124M at 4 x 1024 tokens, the `quickstart`
// recipe, and with `large_model` kLargeModel. Causal attention counts half of the square.
std::vector<KernelRate> measure_kernels(Device& device, const KernelBenchOptions& options);
// Names of all kernels of measure_kernels() and of all GEMMs of named_gemms(), kLargeModel included.
std::vector<std::string> kernel_names();

struct NamedGemm {
  const char* name;
  bool trans_a, trans_b;
  int64_t m, n, k;
};
inline constexpr NamedGemm kAcceleratorGemm{"", false, true, 8192, 8192, 8192};
// The GEMMs of a training step of these models: forward, input gradient, weight gradient.
std::vector<NamedGemm> named_gemms(bool large_model = false);
double gemm_gflops(Device& device, const NamedGemm& shape, DType dtype, double seconds);

// The same fp32 GEMM by oneDNN on this host with as many threads, for comparison.
double onednn_gemm_gflops(const NamedGemm& shape, int threads, double seconds);

// Measures a 2048 x 2048 x 2048 GEMM by Capstan and by oneDNN (bf16, and devices whose kernels do not run on
// the host's threads: Capstan only), about 0.2 s per run; 8192 x 8192 x 8192 on an accelerator. Interleave
// runs with the measured work, so that other programs on the same cores slow down both.
struct PeakMeasurement {
  // peak_gflops: roughly that of the device.
  explicit PeakMeasurement(Device& on, DType type = DType::f32, double peak_gflops = 0);
  void run();
  // The faster one's mean over all runs.
  double gflops() const;
  double seconds() const { return spent_; }

 private:
  Device* device_;
  const int64_t side_;
  Tensor input_, result_;
  // Operands and result of oneDNN's GEMM.
  std::vector<float> host_, host_result_;
  int64_t runs_ = 0;
  double own_ = 0, onednn_ = 0, spent_ = 0;  // seconds
};

// The measured GEMM peak for training steps: the best throughput of either (bf16: of Capstan) on 2048 x 2048
// x 2048 and on two GEMMs of GPT-2 124M, in about two seconds.
double peak_gemm_gflops(Device& device, DType type = DType::f32);

}  // namespace capstan::kernels
