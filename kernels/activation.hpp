// Bias + activation of the MLP, gated or not.
#pragma once

#include "kernels/quantize.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

enum class ActivationKind : uint8_t { gelu, gelu_tanh, silu, relu, squared_relu };

// An activation, gated or not, as in Activation::forward, and without a bias. quick GELU: silu with slope
// 1.702; gpt-oss: gated, with limit 7 and up_offset 1.
struct ActivationFunction {
  ActivationKind kind = ActivationKind::silu;
  bool gated = true;
  // The function is f(slope x) / slope.
  float slope = 1;
  // Gated only: the gate is at most `limit`, and up between -limit and limit; 0: no limits. A value beyond
  // them has no gradient.
  float limit = 0;
  // Gated only: added to up, after the limits.
  float up_offset = 0;

  // Whether Activation::forward computes it.
  bool is_plain() const { return slope == 1 && limit == 0 && up_offset == 0; }
};

struct Activation {
  // Plain: y[r,c] = f(x[r,c] + bias[c]), x and y [rows, cols].
  // Gated: x [rows, 2*cols] holds gate then up: y[r,c] = f(x[r,c] + bias[c]) * (x[r,cols+c] + bias[cols+c]).
  // bias may be null. gelu is the erf form, gelu_tanh the tanh approximation.
  // `quantized`: y for a linear layer; it needs no workspace.
  void (*forward)(Context&, ActivationKind, bool gated, In x, In bias, Out y, int64_t rows, int64_t cols,
                  QuantizedOutput quantized);
  // dx has the shape of x; dx may be x's own storage. The bias gradient is the column sum of dx
  // (Gemm::column_sum).
  void (*backward)(Context&, ActivationKind, bool gated, In dy, In x, In bias, Out dx, int64_t rows,
                   int64_t cols);

  // The first rows_used[0] of `rows` rows; the others are neither read nor written. Null: all rows. y[r] is
  // the activation times weights[r] where given. weights fp32 [rows].
  void (*expert_forward)(Context&, ActivationFunction, In x, const float* weights, const int64_t* rows_used,
                         Out y, int64_t rows, int64_t cols);
  // dx as above, dweights fp32 [rows]; it may be null. dx may be x's own storage.
  void (*expert_backward)(Context&, ActivationFunction, In dy, In x, const float* weights,
                          const int64_t* rows_used, Out dx, float* dweights, int64_t rows, int64_t cols);

  WorkspaceSize (*forward_workspace)(bool gated, bool bias, int64_t cols);
  WorkspaceSize (*backward_workspace)(bool gated, bool bias, int64_t cols);
};

}  // namespace capstan::kernels
