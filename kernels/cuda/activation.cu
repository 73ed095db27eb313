// Bias and activation of the MLP. Bytes moved in fp32: plain forward 8 rows cols, backward 12; gated forward
// 12, backward 20. A quantized output adds its codes, since y is encoded in tiles as it is computed.
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
      group = Array<T>::unpack(Array<T>::pack(group));
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
  if (refuse_quantized_output(c, quantized)) return;
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

// ---- with slope and limits, and of experts

// Values of the gate and of up within their limits, and where these pass a gradient.
struct LimitedGate {
  float gate, up;
  bool gate_passes, up_passes;
};
__device__ LimitedGate limited_gate(const ActivationFunction& e, float gate, float up) {
  const float limit = e.limit > 0 ? e.limit : INFINITY;
  const bool gate_passes = !(gate > limit), up_passes = !(std::fabs(up) > limit);
  // NaN passes.
  const float within = up > limit ? limit : up < -limit ? -limit : up;
  return {gate_passes ? gate : limit, within + e.up_offset, gate_passes, up_passes};
}

// f(slope x) / slope.
template <class F>
__device__ ActivationValue with_slope(float slope, float inverse_slope, float x) {
  const ActivationValue f = F::of(slope * x);
  return {f.value * inverse_slope, f.derivative};
}

template <class T>
struct ExpertRows {
  ActivationFunction e;
  Array<T> x;
  // Null: 1.
  const float* weights;
  // Null: all.
  const int64_t* rows_used;
  int64_t cols;

  __device__ bool uses(int64_t row) const { return !rows_used || row < *rows_used; }
  __device__ float weight(int64_t row) const { return weights ? weights[row] : 1.0f; }
  // The first column of a row of x.
  __device__ int64_t begin(int64_t row) const { return row * (e.gated ? 2 * cols : cols); }
};

template <class F, class T>
__global__ void expert_forward_kernel(ExpertRows<T> rows, Array<T> y) {
  constexpr int kSize = kGroup<T>;
  const int64_t row = block_index(), cols = rows.cols, at = rows.begin(row);
  if (!rows.uses(row)) return;
  const float weight = rows.weight(row), inverse_slope = 1.0f / rows.e.slope;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    auto group = rows.x.load(at + i, cols - i);
    if (rows.e.gated) {
      const auto up = rows.x.load(at + cols + i, cols - i);
      for (int k = 0; k < kSize; ++k) {
        const LimitedGate g = limited_gate(rows.e, group[k], up[k]);
        group[k] = with_slope<F>(rows.e.slope, inverse_slope, g.gate).value * g.up * weight;
      }
    } else {
      for (int k = 0; k < kSize; ++k)
        group[k] = with_slope<F>(rows.e.slope, inverse_slope, group[k]).value * weight;
    }
    y.store(row * cols + i, cols - i, group);
  }
}

template <class F, class T>
__global__ void expert_backward_kernel(ExpertRows<T> rows, Array<T> dy, Array<T> dx, float* dweights) {
  constexpr int kSize = kGroup<T>;
  const int64_t row = block_index(), cols = rows.cols, at = rows.begin(row);
  if (!rows.uses(row)) return;
  const float weight = rows.weight(row), inverse_slope = 1.0f / rows.e.slope;
  // dy · y without the weight.
  float sum = 0;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    const auto d = dy.load(row * cols + i, cols - i);
    auto gate = rows.x.load(at + i, cols - i);
    auto up = d;
    if (rows.e.gated) up = rows.x.load(at + cols + i, cols - i);
    for (int k = 0; k < kSize; ++k) {
      const LimitedGate g =
          rows.e.gated ? limited_gate(rows.e, gate[k], up[k]) : LimitedGate{gate[k], 1.0f, true, true};
      const ActivationValue f = with_slope<F>(rows.e.slope, inverse_slope, g.gate);
      sum += f.value * g.up * d[k];
      gate[k] = g.gate_passes ? d[k] * weight * g.up * f.derivative : 0.0f;
      up[k] = g.up_passes ? d[k] * weight * f.value : 0.0f;
    }
    dx.store(at + i, cols - i, gate);
    if (rows.e.gated) dx.store(at + cols + i, cols - i, up);
  }
  if (!dweights) return;
  sum = block_sum(sum);
  if (thread_index() == 0) dweights[row] = sum;
}

void expert_forward(Context& c, ActivationFunction e, In x, const float* weights, const int64_t* rows_used,
                    Out y, int64_t rows, int64_t cols) {
  by_kind(e.kind, [&](auto function) {
    by_type({x, y}, [&](auto type) {
      using T = decltype(type);
      launch(c, {rows, threads_for(cols, kGroup<T>)}, expert_forward_kernel<decltype(function), T>,
             ExpertRows<T>{e, array_of<T>(x), weights, rows_used, cols}, array_of<T>(y));
    });
  });
}
void expert_backward(Context& c, ActivationFunction e, In dy, In x, const float* weights,
                     const int64_t* rows_used, Out dx, float* dweights, int64_t rows, int64_t cols) {
  by_kind(e.kind, [&](auto function) {
    by_type({dy, x, dx}, [&](auto type) {
      using T = decltype(type);
      launch(c, {rows, threads_for(cols, kGroup<T>)}, expert_backward_kernel<decltype(function), T>,
             ExpertRows<T>{e, array_of<T>(x), weights, rows_used, cols}, array_of<T>(dy), array_of<T>(dx),
             dweights);
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
                                 .expert_forward = expert_forward,
                                 .expert_backward = expert_backward,
                                 .forward_workspace = no_workspace,
                                 .backward_workspace = no_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
