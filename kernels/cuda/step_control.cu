// Work at the end of a step: a few numbers, in a fixed order, and the fingerprint of gradients, whose sum of
// integers is the same in any order. Bytes moved: those of the gradients, once, for a fingerprint; else a few
// hundred.
#include "kernels/step_control.hpp"

#include "kernels/common/step_control.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

__global__ void sum_losses_kernel(const double* sums, int64_t count, double tokens, double* total) {
  if (thread_index() != 0) return;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += sums[i];
  total[0] = sum;
  total[1] = tokens;
}
void sum_losses(Context& c, const double* sums, int64_t count, double tokens, double* total) {
  launch(c, {1, kWarp}, sum_losses_kernel, sums, count, tokens, total);
}

template <class T>
__global__ void sum_ranks_kernel(const T* parts, int64_t ranks, T* sum, int64_t n) {
  const int64_t i = global_thread();
  if (i >= n) return;
  T total = parts[i];
  for (int64_t rank = 1; rank < ranks; ++rank) total += parts[rank * n + i];
  sum[i] = total;
}
void sum_ranks(Context& c, In parts, int64_t ranks, Out sum, int64_t n) {
  constexpr int kThreads = 128;
  const Grid grid{ceil_div(n, int64_t{kThreads}), kThreads};
  if (parts.dtype == DType::i64)
    launch(c, grid, sum_ranks_kernel<int64_t>, parts.as<int64_t>(), ranks, sum.as<int64_t>(), n);
  else
    launch(c, grid, sum_ranks_kernel<double>, parts.as<double>(), ranks, sum.as<double>(), n);
}

constexpr int kHashThreads = 256;
constexpr int64_t kHashBlocks = 1024;
__global__ void fingerprint_kernel(const std::byte* data, int64_t bytes, int64_t salt, uint64_t* sum) {
  const int64_t words = ceil_div(bytes, kFingerprintWord);
  uint64_t own = 0;
  for (int64_t i = global_thread(); i < words; i += grid_blocks() * kHashThreads)
    own += word_hash(data, bytes, i, salt);
  own = block_sum(own);
  if (thread_index() == 0) atomic_add(sum, own);
}
void add_fingerprint(Context& c, In data, int64_t bytes, int64_t salt, int64_t* sum) {
  const int64_t blocks = ceil_div(ceil_div(bytes, kFingerprintWord), int64_t{kHashThreads});
  launch(c, {blocks < kHashBlocks ? blocks : kHashBlocks, kHashThreads}, fingerprint_kernel,
         data.as<std::byte>(), bytes, salt, reinterpret_cast<uint64_t*>(sum));
}

__global__ void control_kernel(StepLimits limits, StepValues* values) {
  if (thread_index() == 0) control_step(limits, *values);
}
void control(Context& c, StepLimits limits, Out values) {
  launch(c, {1, kWarp}, control_kernel, limits, values.as<StepValues>());
}

}  // namespace

const StepControlKernels& step_control_family() {
  static const StepControlKernels family{.sum_losses = sum_losses,
                                         .sum_ranks = sum_ranks,
                                         .add_fingerprint = add_fingerprint,
                                         .control = control};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
