// Scalar work at the end of a step: a few numbers, in a fixed order.
#include "kernels/step_control.hpp"

#include <algorithm>
#include <atomic>

#include "base/checked.hpp"
#include "base/thread_pool.hpp"
#include "kernels/common/step_control.hpp"
#include "kernels/cpu/families.hpp"

namespace capstan::kernels {

namespace {

void sum_losses(Context&, const double* sums, int64_t count, double tokens, double* total) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += sums[i];
  total[0] = sum;
  total[1] = tokens;
}

template <class T>
void add_in_order(const T* parts, int64_t ranks, T* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T total = parts[i];
    for (int64_t r = 1; r < ranks; ++r) total += parts[r * n + i];
    sum[i] = total;
  }
}

void sum_ranks(Context&, In parts, int64_t ranks, Out sum, int64_t n) {
  if (parts.dtype == DType::i64)
    add_in_order(parts.as<int64_t>(), ranks, sum.as<int64_t>(), n);
  else
    add_in_order(parts.as<double>(), ranks, sum.as<double>(), n);
}

void add_fingerprint(Context& c, In data, int64_t bytes, int64_t salt, int64_t* sum) {
  constexpr int64_t kTile = int64_t{1} << 14;  // words
  const int64_t words = ceil_div(bytes, kFingerprintWord);
  std::atomic<uint64_t> total = 0;
  c.pool->parallel_for(ceil_div(words, kTile), [&](int64_t tile, int) {
    const int64_t end = std::min(words, (tile + 1) * kTile);
    uint64_t own = 0;
    for (int64_t i = tile * kTile; i < end; ++i) own += word_hash(data.as<std::byte>(), bytes, i, salt);
    total += own;
  });
  *sum = static_cast<int64_t>(static_cast<uint64_t>(*sum) + total.load());
}

void control(Context&, StepLimits limits, Out values) {
  control_step(limits, *values.as<StepValues>());
}

}  // namespace

const StepControlKernels& cpu_step_control() {
  static const StepControlKernels family{.sum_losses = sum_losses,
                                         .sum_ranks = sum_ranks,
                                         .add_fingerprint = add_fingerprint,
                                         .control = control};
  return family;
}

}  // namespace capstan::kernels
