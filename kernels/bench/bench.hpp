// What this machine's kernels reach: the roofs that logs and `capstan bench` compare with, and each kernel's share of the one
// that binds it.
#pragma once

#include <string>
#include <vector>

#include "tensor/device.hpp"
#include "tensor/tensor.hpp"

namespace capstan::kernels {

// The type whose product rate bounds a step that computes in `compute`: fp32 too where bf16 is widened.
DType product_type(DType compute);

// The rate of matrix products of that type, 2mnk floating-point operations each, in GFLOP/s: the best seen of a few medium shapes in
// about 0.3 s. What a training step's `gemm%` refers to.
double measured_gemm_gflops(Device& device, DType type = DType::f32);

// The rate of a copy of 64 MiB, bytes read plus bytes written, in GB/s: the best seen in about 0.1 s.
double measured_copy_gbps(Device& device);

enum class Peak : uint8_t { gemm, copy };
struct KernelRate {
  std::string name;  // "attention forward 4x1024x12x64"
  Peak peak;         // what binds it
  double rate = 0;   // GFLOP/s or GB/s
  double share = 0;  // of the roof
};
// One row for each kernel at the shapes of a model: GPT-2 124M at 4 x 1024 tokens and the `quickstart` recipe. Causal
// attention counts half of the square. Each takes about `seconds`.
std::vector<KernelRate> measure_kernels(Device& device, double gemm_gflops, double copy_gbps,
                                        double seconds = 0.3);

struct ProductShape {
  const char* name;
  bool trans_a, trans_b;
  int64_t m, n, k;
};
// The products of a training step of the two models: forward, input gradient, weight gradient.
const std::vector<ProductShape>& product_shapes();
double product_gflops(Device& device, const ProductShape& shape, DType dtype, double seconds);

// The same fp32 product by oneDNN on this host with as many threads: the yardstick of the project's own product.
double onednn_product_gflops(const ProductShape& shape, int threads, double seconds);

// One run of the 2048 x 2048 x 2048 product by each of the two (of bf16 by this program only), about 0.2 s: what the machine gives at this moment. Other programs
// on the same cores slow it down as they slow down what is measured between two runs.
struct PeakMeasurement {
  explicit PeakMeasurement(Device& on, DType type = DType::f32);
  void run();
  double gflops() const;  // the faster one's mean over all runs
  double seconds() const { return spent_; }

 private:
  Device* device_;
  Tensor input_, result_;
  std::vector<float> host_, host_result_;  // oneDNN's
  int64_t runs_ = 0;
  double own_ = 0, onednn_ = 0, spent_ = 0;  // seconds
};

// The roof that a training step is compared with: the best rate that either of them (of bf16 this program) reaches on 2048 x 2048 x 2048 and on
// two products of GPT-2 124M, in about two seconds.
double roof_gemm_gflops(Device& device, DType type = DType::f32);

}  // namespace capstan::kernels
