// Bias + activation of the MLP. Bytes in fp32: plain forward 8 rows cols, backward 12; gated forward 12,
// backward 20.
#include "kernels/activation.hpp"

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/quantize.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// Each function: value(x), and both(x, derivative) which returns the value as well.
struct Gelu {
  static HWY_INLINE VF value(VF x) {
    VF cumulative, density;
    normal_distribution(x, cumulative, density);
    return hn::Mul(x, cumulative);
  }
  static HWY_INLINE VF both(VF x, VF& derivative) {
    VF cumulative, density;
    normal_distribution(x, cumulative, density);
    derivative = hn::MulAdd(x, density, cumulative);
    return hn::Mul(x, cumulative);
  }
};
// (1 + tanh u) / 2 = sigmoid(2u) = 1 / (1 + 2^(-2u / ln 2)), u = sqrt(2/pi) (x + 0.044715 x³).
struct GeluTanh {
  static constexpr float kTwoC = 2 * 0.7978845608028654f, kCubic = 0.044715f;
  static constexpr float kPower = -kTwoC * 1.44269504088896341f;
  static HWY_INLINE VF cumulative(VF x, VF x2) {
    return falling_sigmoid2(hn::Mul(x, hn::MulAdd(x2, splat(kCubic * kPower), splat(kPower))));
  }
  static HWY_INLINE VF value(VF x) { return hn::Mul(x, cumulative(x, hn::Mul(x, x))); }
  static HWY_INLINE VF both(VF x, VF& derivative) {
    const VF x2 = hn::Mul(x, x), s = cumulative(x, x2);
    const VF y = hn::Mul(x, s);
    const VF inner = hn::MulAdd(x2, splat(3 * kCubic * kTwoC), splat(kTwoC));
    derivative = hn::MulAdd(hn::Mul(y, hn::Sub(splat(1.0f), s)), inner, s);
    return y;
  }
};
struct Silu {
  static HWY_INLINE VF value(VF x) { return hn::Mul(x, sigmoid(x)); }
  static HWY_INLINE VF both(VF x, VF& derivative) {
    const VF s = sigmoid(x), y = hn::Mul(x, s);
    derivative = hn::MulAdd(y, hn::Sub(splat(1.0f), s), s);
    return y;
  }
};
// x > 0 ? … : 0 keeps NaN: the comparison is made the other way round.
struct Relu {
  static HWY_INLINE VF value(VF x) { return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(DF())), x); }
  static HWY_INLINE VF both(VF x, VF& derivative) {
    derivative = hn::IfThenElseZero(hn::Gt(x, hn::Zero(DF())), splat(1.0f));
    return value(x);
  }
};
struct SquaredRelu {
  static HWY_INLINE VF value(VF x) {
    const VF r = Relu::value(x);
    return hn::Mul(r, r);
  }
  static HWY_INLINE VF both(VF x, VF& derivative) {
    const VF r = Relu::value(x);
    derivative = hn::Add(r, r);
    return hn::Mul(r, r);
  }
};

// The bias of a row as fp32.
WorkspaceSize bias_workspace(bool gated, bool bias, int64_t cols) {
  return {bias ? static_cast<size_t>(gated ? 2 * cols : cols) * sizeof(float) : 0, 0};
}
HWY_INLINE const float* wide_bias(const WorkspaceParts& workspace, In bias, int64_t n) {
  if (!bias) return nullptr;
  auto* wide = workspace.shared<float>();
  widen(bias, wide, n);
  return wide;
}

// Columns of one row: `at` is its first element. Held by value, so that stores do not make the loop read
// pointers again. Whether there is a bias is a branch and no template parameter: the loops wait for memory,
// and each copy of them takes seconds to compile.
template <class T>
struct Row {
  Array<T> x;
  int64_t at;
  const float* bias;
  HWY_INLINE VF operator()(int64_t i) const {
    const VF v = x.at(at + i);
    return bias ? hn::Add(v, load(bias + i)) : v;
  }
  HWY_INLINE VF operator()(int64_t i, int64_t n) const {
    const VF v = x.part(at + i, n);
    return bias ? hn::Add(v, load_part(bias + i, n)) : v;
  }
};

// body(put, v …) for each vector of the rows: v are their values there, and put(y, at, w) writes w to the
// same columns of the row of y that begins at `at`.
template <class Full, class... Rows>
HWY_INLINE void for_row(int64_t cols, Full&& body, Rows... rows) {
  int64_t i = 0;
  for (; i + kStep <= cols; i += kStep)
    body([&](auto y, int64_t at, VF v) HWY_ATTR { y.put(at + i, v); }, rows(i)...);
  if (i < cols)
    body([&](auto y, int64_t at, VF v) HWY_ATTR { y.put_part(at + i, v, cols - i); }, rows(i, cols - i)...);
}

template <class F>
void forward_as(Context& c, bool gated, In x_in, In bias_in, Out y_out, int64_t rows, int64_t cols,
                const QuantizedOutput& quantized) {
  const WorkspaceParts workspace(c, bias_workspace(gated, static_cast<bool>(bias_in), cols));
  if (!workspace) return;
  const float* bias = wide_bias(workspace, bias_in, gated ? 2 * cols : cols);
  by_type({x_in, y_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    using From = Row<T>;
    const auto x = array_of<T>(x_in), y = array_of<T>(y_out);
    const float* up_bias = bias ? bias + cols : nullptr;
    const int64_t block = quantized ? kQuantizedRows : rows_per_block(cols);
    parallel_blocks(c, rows, block, [=](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t to = r * cols;
        if (!gated) {
          for_row(
              cols, [=](auto put, VF v) HWY_ATTR { put(y, to, F::value(v)); }, From{x, to, bias});
        } else {
          for_row(
              cols, [=](auto put, VF gate, VF up) HWY_ATTR { put(y, to, hn::Mul(F::value(gate), up)); },
              From{x, 2 * to, bias}, From{x, 2 * to + cols, up_bias});
        }
      }
      if (quantized) quantize_rows(quantized, y_out, rows, cols, begin, end);
    });
  });
}

template <class F>
void backward_as(Context& c, bool gated, In dy_in, In x_in, In bias_in, Out dx_out, int64_t rows,
                 int64_t cols) {
  const WorkspaceParts workspace(c, bias_workspace(gated, static_cast<bool>(bias_in), cols));
  if (!workspace) return;
  const float* bias = wide_bias(workspace, bias_in, gated ? 2 * cols : cols);
  by_type({x_in, dy_in, dx_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    using From = Row<T>;
    const auto x = array_of<T>(x_in), dy = array_of<T>(dy_in), dx = array_of<T>(dx_out);
    const float* up_bias = bias ? bias + cols : nullptr;
    parallel_blocks(c, rows, rows_per_block(cols), [=](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const Row<T> d{dy, r * cols, nullptr};
        if (!gated) {
          for_row(
              cols,
              [=](auto put, VF v, VF gradient) HWY_ATTR {
                VF derivative;
                F::both(v, derivative);
                put(dx, r * cols, hn::Mul(gradient, derivative));
              },
              From{x, r * cols, bias}, d);
        } else {
          const int64_t gate = r * 2 * cols, up = gate + cols;
          for_row(
              cols,
              [=](auto put, VF v, VF upper, VF gradient) HWY_ATTR {
                VF derivative;
                const VF value = F::both(v, derivative);
                put(dx, gate, hn::Mul(hn::Mul(gradient, upper), derivative));
                put(dx, up, hn::Mul(gradient, value));
              },
              From{x, gate, bias}, From{x, up, up_bias}, d);
        }
      }
    });
  });
}

// body(F{}) with the function of `kind`.
template <class Body>
HWY_INLINE void by_kind(ActivationKind kind, Body&& body) {
  switch (kind) {
    case ActivationKind::gelu:
      return body(Gelu());
    case ActivationKind::gelu_tanh:
      return body(GeluTanh());
    case ActivationKind::silu:
      return body(Silu());
    case ActivationKind::relu:
      return body(Relu());
    case ActivationKind::squared_relu:
      return body(SquaredRelu());
  }
}
void forward(Context& c, ActivationKind kind, bool gated, In x, In bias, Out y, int64_t rows, int64_t cols,
             QuantizedOutput quantized) {
  by_kind(kind, [&](auto function) HWY_ATTR {
    forward_as<decltype(function)>(c, gated, x, bias, y, rows, cols, quantized);
  });
}
void backward(Context& c, ActivationKind kind, bool gated, In dy, In x, In bias, Out dx, int64_t rows,
              int64_t cols) {
  by_kind(kind, [&](auto function)
                    HWY_ATTR { backward_as<decltype(function)>(c, gated, dy, x, bias, dx, rows, cols); });
}

// ---- with slope and limits, and of experts

// f(slope x) / slope.
template <class F>
struct SlopedFunction {
  VF slope, inverse;
  HWY_INLINE explicit SlopedFunction(float by) : slope(splat(by)), inverse(splat(1.0f / by)) {}
  HWY_INLINE VF value(VF x) const { return hn::Mul(F::value(hn::Mul(x, slope)), inverse); }
  HWY_INLINE VF both(VF x, VF& derivative) const {
    return hn::Mul(F::both(hn::Mul(x, slope), derivative), inverse);
  }
};

// The gate and up of a vector within their limits, and where these pass a gradient.
struct LimitedGate {
  VF gate, up;
  hn::Mask<DF> gate_passes, up_passes;
  HWY_INLINE LimitedGate(const ActivationFunction& e, VF of_gate, VF of_up) : gate(of_gate), up(of_up) {
    const VF limit = splat(e.limit > 0 ? e.limit : INFINITY), lower = hn::Neg(limit);
    gate_passes = hn::Not(hn::Gt(gate, limit));
    up_passes = hn::Not(hn::Gt(hn::Abs(up), limit));
    gate = hn::IfThenElse(gate_passes, gate, limit);
    up = hn::IfThenElse(hn::Gt(up, limit), limit, hn::IfThenElse(hn::Lt(up, lower), lower, up));
    up = hn::Add(up, splat(e.up_offset));
  }
};

template <class F>
void expert_forward_as(Context& c, const ActivationFunction& e, In x_in, const float* weights,
                       const int64_t* rows_used, Out y_out, int64_t rows, int64_t cols) {
  by_type({x_in, y_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    using From = Row<T>;
    const auto x = array_of<T>(x_in), y = array_of<T>(y_out);
    const int64_t used = rows_used ? std::min(rows, *rows_used) : rows;
    parallel_blocks(c, used, rows_per_block(cols), [=](int64_t begin, int64_t end, int) HWY_ATTR {
      const SlopedFunction<F> f(e.slope);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t to = r * cols;
        const VF weight = splat(weights ? weights[r] : 1.0f);
        if (!e.gated) {
          for_row(
              cols, [=](auto put, VF v) HWY_ATTR { put(y, to, hn::Mul(f.value(v), weight)); },
              From{x, to, nullptr});
        } else {
          for_row(
              cols,
              [=](auto put, VF gate, VF up) HWY_ATTR {
                const LimitedGate g(e, gate, up);
                put(y, to, hn::Mul(hn::Mul(f.value(g.gate), g.up), weight));
              },
              From{x, 2 * to, nullptr}, From{x, 2 * to + cols, nullptr});
        }
      }
    });
  });
}

template <class F>
void expert_backward_as(Context& c, const ActivationFunction& e, In dy_in, In x_in, const float* weights,
                        const int64_t* rows_used, Out dx_out, float* dweights, int64_t rows, int64_t cols) {
  by_type({x_in, dy_in, dx_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    using From = Row<T>;
    const auto x = array_of<T>(x_in), dy = array_of<T>(dy_in), dx = array_of<T>(dx_out);
    const int64_t used = rows_used ? std::min(rows, *rows_used) : rows;
    parallel_blocks(c, used, rows_per_block(cols), [=](int64_t begin, int64_t end, int) HWY_ATTR {
      const SlopedFunction<F> f(e.slope);
      for (int64_t r = begin; r < end; ++r) {
        const From d{dy, r * cols, nullptr};
        const VF weight = splat(weights ? weights[r] : 1.0f);
        // dy · y without the weight.
        VF product = hn::Zero(DF());
        VF* const sum = &product;
        if (!e.gated) {
          for_row(
              cols,
              [=](auto put, VF v, VF gradient) HWY_ATTR {
                VF derivative;
                *sum = hn::MulAdd(f.both(v, derivative), gradient, *sum);
                put(dx, r * cols, hn::Mul(hn::Mul(gradient, weight), derivative));
              },
              From{x, r * cols, nullptr}, d);
        } else {
          const int64_t gate_at = r * 2 * cols, up_at = gate_at + cols;
          for_row(
              cols,
              [=](auto put, VF gate, VF up, VF gradient) HWY_ATTR {
                const LimitedGate g(e, gate, up);
                VF derivative;
                const VF value = f.both(g.gate, derivative), scaled = hn::Mul(gradient, weight);
                *sum = hn::MulAdd(hn::Mul(value, g.up), gradient, *sum);
                put(dx, gate_at,
                    hn::IfThenElseZero(g.gate_passes, hn::Mul(hn::Mul(scaled, g.up), derivative)));
                put(dx, up_at, hn::IfThenElseZero(g.up_passes, hn::Mul(scaled, value)));
              },
              From{x, gate_at, nullptr}, From{x, up_at, nullptr}, d);
        }
        if (dweights) dweights[r] = sum_lanes(product);
      }
    });
  });
}

void expert_forward(Context& c, ActivationFunction e, In x, const float* weights, const int64_t* rows_used,
                    Out y, int64_t rows, int64_t cols) {
  by_kind(e.kind, [&](auto function) HWY_ATTR {
    expert_forward_as<decltype(function)>(c, e, x, weights, rows_used, y, rows, cols);
  });
}
void expert_backward(Context& c, ActivationFunction e, In dy, In x, const float* weights,
                     const int64_t* rows_used, Out dx, float* dweights, int64_t rows, int64_t cols) {
  by_kind(e.kind, [&](auto function) HWY_ATTR {
    expert_backward_as<decltype(function)>(c, e, dy, x, weights, rows_used, dx, dweights, rows, cols);
  });
}

Activation activation_family() {
  return {.forward = forward,
          .backward = backward,
          .expert_forward = expert_forward,
          .expert_backward = expert_backward,
          .forward_workspace = bias_workspace,
          .backward_workspace = bias_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Activation, activation)
#endif
