// Bias + activation of the MLP, gated or not.
#pragma once

#include "kernels/quantize.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

enum class ActivationKind : uint8_t { gelu, gelu_tanh, silu, relu, squared_relu };

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

  WorkspaceSize (*forward_workspace)(bool gated, bool bias, int64_t cols);
  WorkspaceSize (*backward_workspace)(bool gated, bool bias, int64_t cols);
};

}  // namespace capstan::kernels
