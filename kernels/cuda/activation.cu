// Bias and activation of the MLP. Bytes moved in fp32: plain forward 8 rows cols, backward 12; gated forward
// 12, backward 20. A second output adds its codes, since y is encoded in tiles as it is computed.
#include "kernels/activation.hpp"

#include "kernels/cuda/activation_functions.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/quantize_tile.hpp"

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

// Elements of a row of y, from column i on; those from `count` on are 0.
template <class F, class T>
__device__ Group<kGroup<T>> activated(const ActivationRows<T>& rows, int64_t row, int64_t i, int64_t count) {
  auto group = rows.load(row, i, count);
  for (int k = 0; k < kGroup<T>; ++k) group[k] = F::of(group[k]).value;
  if (rows.gated) {
    const auto up = rows.load(row, rows.cols + i, count);
    for (int k = 0; k < kGroup<T>; ++k) group[k] *= up[k];
  }
  return group;
}

template <class F, class T>
__global__ void activation_forward_kernel(ActivationRows<T> rows, Array<T> y) {
  constexpr int kSize = kGroup<T>;
  const int64_t row = block_index(), cols = rows.cols;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize)
    y.store(row * cols + i, cols - i, activated<F>(rows, row, i, cols - i));
}

// The source of a launch that quantizes y as well: computes a group, writes it, and returns it as stored.
template <class T>
struct ActivationSource {
  using Stored = std::conditional_t<std::is_same_v<T, Any>, float, T>;
  static constexpr bool kCopies = false;
  ActivationKind kind;
  ActivationRows<T> rows;
  Array<T> y;

  __device__ Group<kGroup<T>> load(int64_t row, int64_t col, int64_t count) const {
    const int64_t at = row * rows.cols + col;
    auto group = of_kind(row, col, count);
    y.store(at, count, group);
    if constexpr (std::is_same_v<T, Any>)
      group = y.load(at, count);
    else
      for (int k = 0; k < kGroup<T>; ++k) group[k] = to_float(from_float<T>(group[k]));
    return group;
  }

 private:
  __device__ Group<kGroup<T>> of_kind(int64_t row, int64_t col, int64_t count) const {
    switch (kind) {
      case ActivationKind::gelu:
        return activated<Gelu>(rows, row, col, count);
      case ActivationKind::gelu_tanh:
        return activated<GeluTanh>(rows, row, col, count);
      case ActivationKind::silu:
        return activated<Silu>(rows, row, col, count);
      case ActivationKind::relu:
        return activated<Relu>(rows, row, col, count);
      case ActivationKind::squared_relu:
        break;
    }
    return activated<SquaredRelu>(rows, row, col, count);
  }
};

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
  if (refuse_second_output(c, quantized)) return;
  if (quantized) {
    const QuantizeTask task = task_of(quantized, rows, cols);
    return by_type({x, y}, [&](auto type) {
      using T = decltype(type);
      const ActivationRows<T> shape{gated, cols, array_of<T>(x), array_of<Any>(bias)};
      by_layout_of_output(task, [&]<ScaleLayout kLayout>(Layout<kLayout>) {
        quantize_source<kLayout>(c, ActivationSource<T>{kind, shape, array_of<T>(y)}, task);
      });
    });
  }
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
