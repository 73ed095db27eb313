// Measures each kernel at the shapes of a few models; a source file for each topic.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/bench/bench.hpp"
#include "kernels/gemm_arguments.hpp"
#include "kernels/heads.hpp"
#include "kernels/table.hpp"

namespace capstan::kernels {

// The shortest time of as many runs as fit into `seconds`; at least two, because the first one has cold
// caches. On a device with queues, events time several runs in a row, so that the host's launches and waits
// count only if they take longer than the kernels. 1 on the meta device, after one run.
double shortest_seconds(Device& device, double seconds, const std::function<void()>& run);

// Random bits from a linear congruential generator; the upper ones are better.
inline uint32_t next_random(uint32_t& state) {
  return state = state * 1664525u + 1013904223u;
}
// Values in [-1, 1), again and again the same 4 Mi: never measure on zeros, some machines are faster on them.
Tensor noise(Device& device, int64_t n, DType dtype = DType::f32);

struct BenchModel {
  const char* name;
  int64_t batch, seq, groups, heads_per_group, head_dim, width, inner, vocabulary;
  bool gated;
  int64_t tokens() const { return batch * seq; }
  int64_t heads() const { return groups * heads_per_group; }
  QkvLayout qkv() const { return {groups, heads_per_group, head_dim}; }
  std::string prefix() const { return std::string(name) + " "; }
};

class KernelBench {
 public:
  KernelBench(Device& device, const KernelBenchOptions& options)
      : device_(device),
        options_(options),
        attention_(options.attention),
        activations_(options.activations),
        bytes_(size_of(options.activations)) {}

  void run();
  std::vector<KernelRate> take() { return std::move(rates_); }

 private:
  using Topic = std::function<void(KernelBench&)>;
  // Makes the arrays of a topic only if one of its kernels is wanted.
  void run_wanted(const Topic& topic);
  // The rate of `work` (FLOPs or bytes) in the time of `run`.
  void measure(KernelRate kernel, double work, double peak_rate, const std::function<void()>& run);
  void add(KernelRate kernel);
  void bound_by_memory(std::string name, int64_t bytes, const std::function<void()>& run);
  void bound_by_gemms(std::string name, double flops, const std::function<void()>& run);

  // attention.cpp
  void attention(const BenchModel& m);
  void attention_sink(const BenchModel& m);
  void context_attention(const BenchModel& m);
  void rope(const BenchModel& m);
  void head_norm(const BenchModel& m);
  // layers.cpp
  void norms(const BenchModel& m);
  void mlp(const BenchModel& m);
  void cross_entropy(const BenchModel& m);
  void cross_entropy_steps(const BenchModel& m, const Tensor& logits, const Tensor& labels,
                           const Tensor& weight);
  void sampling(const BenchModel& m);
  void embedding(const BenchModel& m);
  // experts.cpp
  void experts(const BenchModel& m);
  void expert_rows(const BenchModel& m, const Tensor& numbers, const Tensor& row_of_slot,
                   const Tensor& slot_of_row);
  void expert_gemms(const std::string& prefix, const Tensor& sizes, int64_t rows, int64_t out, int64_t in);
  void expert_activation(const BenchModel& m);
  void router(const BenchModel& m);
  // low_precision.cpp
  void quantize(const BenchModel& m);
  void quantized_outputs(const BenchModel& m);
  void low_precision_gemms(const BenchModel& m);
  void adapters(const BenchModel& m);
  void nf4(const BenchModel& m);
  // optimizers.cpp
  void adam();
  void optimizers();
  void moments();
  void gradient_sums();
  // elementwise.cpp
  void elementwise();
  void random_masks();
  void sums();

  // Codes and scales of a matrix [rows, cols]; the scale of the tensor is 1.
  GemmOperand empty_operand(const QuantizeFormat& format, int64_t rows, int64_t cols) const;
  // Codes of a matrix of noise.
  GemmOperand quantized_noise(const QuantizeFormat& format, int64_t rows, int64_t cols) const;
  // Elements of the kernels that have no shape of a model.
  static constexpr int64_t kElements = 16 << 20;

  Device& device_;
  const KernelBenchOptions& options_;
  // Data types of attention, and of the activations and weights of the other kernels with its bytes.
  const DType attention_, activations_;
  const int64_t bytes_;
  std::vector<KernelRate> rates_;
};

}  // namespace capstan::kernels
