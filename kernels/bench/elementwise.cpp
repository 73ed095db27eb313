#include "base/philox.hpp"
#include "kernels/bench/kernel_bench.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

// In fp32, and the conversion to 16 bits.
void KernelBench::elementwise() {
  const int64_t n = kElements;
  const Tensor x = noise(device_, n), y = noise(device_, n), z = Tensor::zeros(device_, {n}),
               narrow = Tensor::zeros(device_, {n}, DType::bf16);
  const Elementwise& kernel = *device_.table().elementwise;
  bound_by_memory("fill (16 Mi)", 4 * n, [&] { launch(device_, kernel.fill, z, 1.0f, n); });
  bound_by_memory("cast to bf16 (16 Mi)", 6 * n, [&] { launch(device_, kernel.cast, x, narrow, n); });
  bound_by_memory("add (16 Mi)", 12 * n, [&] { launch(device_, kernel.add, x, y, z, n); });
  bound_by_memory("axpy (16 Mi)", 12 * n, [&] { launch(device_, kernel.axpy, 1e-3f, x, z, n); });
  bound_by_memory("scale (16 Mi)", 8 * n, [&] { launch(device_, kernel.scale, z, -1.0f, n); });
  bound_by_memory("copy of rows (16 Mi)", 8 * n,
                  [&] { launch(device_, kernel.copy_rows, x, 4096, z, 4096, n / 4096, 4096); });
}

void KernelBench::random_masks() {
  const int64_t n = kElements, rows = 4096, cols = n / rows;
  std::vector<int64_t> ids(static_cast<size_t>(rows));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const Tensor x = noise(device_, n), y = Tensor::zeros(device_, {n}),
               dropout_rows = Tensor::from_host<int64_t>(device_, {rows}, ids);
  const Elementwise& kernel = *device_.table().elementwise;
  bound_by_memory("dropout (16 Mi)", 8 * n, [&] {
    launch(device_, kernel.dropout, x, y, rows, cols, 0, 0.1f, PhiloxKey{1, 2}, dropout_rows);
  });
  bound_by_memory("jitter (16 Mi)", 8 * n, [&] {
    launch(device_, kernel.jitter, x, y, rows, cols, 0.01f, PhiloxKey{1, 2}, dropout_rows);
  });
}

void KernelBench::sums() {
  const int64_t n = kElements, parts = 4;
  const Tensor x = noise(device_, n), weight = noise(device_, n), y = Tensor::zeros(device_, {n / parts}),
               sum = Tensor::zeros(device_, {1}, DType::f64), count = Tensor::zeros(device_, {1}, DType::i64);
  const Elementwise& kernel = *device_.table().elementwise;
  bound_by_memory("sum of four parts (16 Mi)", 4 * n + 4 * n / parts,
                  [&] { launch(device_, kernel.sum_parts, x, parts, y, n / parts); });
  bound_by_memory("maximum of four parts (16 Mi)", 4 * n + 4 * n / parts,
                  [&] { launch(device_, kernel.max_parts, x, parts, y, n / parts); });
  bound_by_memory("sum (16 Mi)", 4 * n,
                  [&] { launch(device_, kernel.sum_workspace(n), kernel.sum, x, n, sum, false); });
  bound_by_memory("weighted sum (16 Mi)", 8 * n, [&] {
    launch(device_, kernel.weighted_sum_workspace(n), kernel.weighted_sum, x, weight, n, sum, false);
  });
  bound_by_memory("number of values that are not finite (16 Mi)", 4 * n, [&] {
    launch(device_, kernel.count_nonfinite_workspace(n), kernel.count_nonfinite, x, n, count, false);
  });
}

}  // namespace capstan::kernels
