// The tensors of a GEMM's operands and of what is quantized for it, which launch() passes as raw arrays.
#pragma once

#include "kernels/gemm.hpp"
#include "kernels/quantize.hpp"
#include "tensor/launch.hpp"

namespace capstan {

// A matrix that a GEMM reads. With scales its values are codes, stored [rows, k] as ScaleLayout describes;
// the codes of 4 bits are [rows, k / 2 rounded up].
struct GemmOperand {
  Tensor values;
  Tensor scale, tensor_scale;
  kernels::ScaleLayout layout = kernels::ScaleLayout::none;
  // Elements of a row; only with scales.
  int64_t k = 0;

  GemmOperand() = default;
  GemmOperand(Tensor matrix) : values(std::move(matrix)) {}  // NOLINT: an implicit conversion on purpose
  GemmOperand(Tensor codes, Tensor scales, Tensor of_tensor, kernels::ScaleLayout scale_layout,
              int64_t elements)
      : values(std::move(codes)),
        scale(std::move(scales)),
        tensor_scale(std::move(of_tensor)),
        layout(scale_layout),
        k(elements) {}
  bool has_scales() const { return layout != kernels::ScaleLayout::none; }
};

// See kernels::QuantizedOutput.
struct QuantizedOutputTensors {
  kernels::QuantizeFormat format;
  Tensor tensor_scale;
  GemmOperand rows, columns;
  Tensor amax;
};

template <>
struct KernelArgument<kernels::Operand> {
  static kernels::Operand from(Device& device, const Tensor& t) {
    return KernelArgument<kernels::In>::from(device, t);
  }
  static kernels::Operand from(Device& device, const GemmOperand& x) {
    kernels::Operand raw = from(device, x.values);
    raw.layout = x.layout;
    raw.scale = KernelArgument<kernels::In>::from(device, x.scale).data;
    raw.tensor_scale = KernelArgument<const float*>::from(device, x.tensor_scale);
    return raw;
  }
};
// The codes and block scales that a kernel writes.
template <>
struct KernelArgument<kernels::Quantized> {
  static kernels::Quantized from(Device& device, const GemmOperand& x) {
    const bool blocks = x.layout != kernels::ScaleLayout::tensor;
    return {KernelArgument<kernels::Out>::from(device, x.values).data,
            blocks ? KernelArgument<kernels::Out>::from(device, x.scale).data : nullptr};
  }
};
template <>
struct KernelArgument<kernels::QuantizedOutput> {
  static kernels::QuantizedOutput from(Device& device, const QuantizedOutputTensors& output) {
    return {.format = output.format,
            .tensor_scale = KernelArgument<const float*>::from(device, output.tensor_scale),
            .rows = KernelArgument<kernels::Quantized>::from(device, output.rows),
            .columns = KernelArgument<kernels::Quantized>::from(device, output.columns),
            .amax = KernelArgument<float*>::from(device, output.amax)};
  }
};
}  // namespace capstan
