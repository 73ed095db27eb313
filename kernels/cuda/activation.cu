// Bias and activation of the MLP. Bytes moved in fp32: plain forward 8 rows cols, backward 12; gated forward
// 12, backward 20.
#include "kernels/activation.hpp"

#include "kernels/cuda/activation_functions.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

template <class T>
struct ActivationRows {
  bool gated;
  int64_t cols;
  // x [rows, cols], or [rows, 2 cols] if gated.
  Array<T> x;
  // Null: none.
  Array<Any> bias;

  __device__ int64_t width() const { return gated ? 2 * cols : cols; }
  // Columns of a row of x, from `column` on, with the bias.
  __device__ Group<kGroup<T>> load(int64_t row, int64_t column, int64_t count) const {
    auto group = x.load(row * width() + column, count);
    if (bias) {
      const auto shift = bias.template group<kGroup<T>>(column, count);
      for (int k = 0; k < kGroup<T>; ++k) group[k] += shift[k];
    }
    return group;
  }
};

template <class F, class T>
__global__ void activation_forward_kernel(ActivationRows<T> rows, Array<T> y) {
  constexpr int kSize = kGroup<T>;
  const int64_t row = block_index(), cols = rows.cols;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    auto group = rows.load(row, i, cols - i);
    for (int k = 0; k < kSize; ++k) group[k] = F::of(group[k]).value;
    if (rows.gated) {
      const auto up = rows.load(row, cols + i, cols - i);
      for (int k = 0; k < kSize; ++k) group[k] *= up[k];
    }
    y.store(row * cols + i, cols - i, group);
  }
}

template <class F, class T>
__global__ void activation_backward_kernel(ActivationRows<T> rows, Array<T> dy, Array<T> dx) {
  constexpr int kSize = kGroup<T>;
  const int64_t row = block_index(), cols = rows.cols, at = row * rows.width();
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    auto d = dy.load(row * cols + i, cols - i);
    auto gate = rows.load(row, i, cols - i);
    auto up = d;
    if (rows.gated) up = rows.load(row, cols + i, cols - i);
    for (int k = 0; k < kSize; ++k) {
      const ActivationValue f = F::of(gate[k]);
      gate[k] = (rows.gated ? d[k] * up[k] : d[k]) * f.derivative;
      up[k] = d[k] * f.value;
    }
    dx.store(at + i, cols - i, gate);
    if (rows.gated) dx.store(at + cols + i, cols - i, up);
  }
}

void forward(Context& c, ActivationKind kind, bool gated, In x, In bias, Out y, int64_t rows, int64_t cols,
             QuantizedOutput quantized) {
  if (quantized) return refuse(c, "quantized outputs are not written on this device yet");
  by_kind(kind, [&](auto function) {
    by_type({x, y}, [&](auto type) {
      using T = decltype(type);
      const ActivationRows<T> shape{gated, cols, array_of<T>(x), array_of<Any>(bias)};
      launch(c, {rows, threads_for(cols, kGroup<T>)}, activation_forward_kernel<decltype(function), T>, shape,
             array_of<T>(y));
    });
  });
}
void backward(Context& c, ActivationKind kind, bool gated, In dy, In x, In bias, Out dx, int64_t rows,
              int64_t cols) {
  by_kind(kind, [&](auto function) {
    by_type({dy, x, dx}, [&](auto type) {
      using T = decltype(type);
      const ActivationRows<T> shape{gated, cols, array_of<T>(x), array_of<Any>(bias)};
      launch(c, {rows, threads_for(cols, kGroup<T>)}, activation_backward_kernel<decltype(function), T>,
             shape, array_of<T>(dy), array_of<T>(dx));
    });
  });
}

// The bias is read in its own type.
WorkspaceSize no_workspace(bool, bool, int64_t) {
  return {};
}

}  // namespace

const Activation& activation_family() {
  static const Activation family{.forward = forward,
                                 .backward = backward,
                                 .forward_workspace = no_workspace,
                                 .backward_workspace = no_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
