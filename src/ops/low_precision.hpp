// GEMMs of linear layers in 8 or 4 bits, with the scaling recipes of Transformer Engine. A linear layer has
// three:
//
//   output           y[N, out] = x W^T      x and W along `in`
//   input gradient   dx[N, in] = dy W       dy and W^T along `out`
//   weight gradient  dW[out, in] = dy^T x   dy^T and x^T along N, as columns
//
// x and W are in LowPrecision::forward, dy in LowPrecision::gradient; sums are fp32, results bf16 or fp16, as
// x. The parameter store keeps the weights and the state of the scales (parallel/low_precision.hpp).
#pragma once

#include <memory>

#include "base/philox.hpp"
#include "kernels/gemm_arguments.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

// The use of a weight by a linear layer.
enum class WeightRole : uint8_t { forward, input_gradient };

enum class ScalingRecipe : uint8_t {
  // One scale for a tensor, from the maxima of earlier steps.
  delayed,
  // One scale for a tensor, from its maximum.
  tensorwise,
  // Blocks of 1 x 128 elements, of weights 128 x 128; powers of two.
  blockwise,
  mxfp8,
  // Blocks of 1 x 16, of weights 16 x 16; gradients are rounded stochastically, and x and dy are transformed
  // by a Hadamard matrix for the weight gradient.
  nvfp4,
};

struct LowPrecision {
  ScalingRecipe recipe = ScalingRecipe::tensorwise;
  DType forward = DType::f8e4m3, gradient = DType::f8e4m3;
  // False: weight gradients are computed from x and dy as they are.
  bool weight_gradient = true;
};

// The tensors of a linear layer that are quantized; their order in LayerScaling.
enum class LayerTensor : uint8_t { input, weight, output_gradient };

struct LayerScaling {
  const LowPrecision* format = nullptr;
  // fp32 [3, 2]: scale and its inverse. Used of all three with delayed scaling, of the weight with tensorwise
  // scaling and NVFP4.
  Tensor scale;
  // Delayed scaling: fp32 [3], the maxima since the last update of the scales; else undefined.
  Tensor amax;
  // Stochastic rounding: the key of this step, and the number of its uses; null: the numbers of call 0.
  PhiloxKey rounding{};
  uint64_t* rounding_calls = nullptr;
};

namespace ops {

// The value to which a tensor's maximum is scaled: the largest code; for 1 x 16 blocks times the largest
// block scale.
float scale_numerator(kernels::ScaleLayout layout, DType codes);

// A matrix for the two GEMMs that read it.
struct QuantizedMatrix {
  GemmOperand rows;     // [rows, cols]
  GemmOperand columns;  // [cols, rows]
};
struct QuantizeRequest {
  bool rows = false, columns = false;
  // Delayed scaling: raise LayerScaling::amax.
  bool record_amax = false;
};
// Results that are not requested stay undefined.
QuantizedMatrix quantize(const LayerScaling& scaling, LayerTensor kind, const Tensor& x,
                         QuantizeRequest request);

// Output for the forward GEMM of a linear layer, written by the launch that computes the layer's input:
// codes where the scaling recipe allows it, else the maximum from which the scale is computed. The layer
// takes it out.
struct QuantizedInput {
  // Scaling of that linear layer.
  const LayerScaling* scaling = nullptr;
  QuantizedOutputTensors output;
};
// Output for an input [rows, cols] that is not computed yet.
std::shared_ptr<QuantizedInput> prepare_input(Device& device, const LayerScaling& scaling, int64_t rows,
                                              int64_t cols, QuantizeRequest request);
// quantize() of an input; launches only what `prepared` lacks (null, or of another layer: everything).
QuantizedMatrix quantize_input(const LayerScaling& scaling, const Tensor& x, QuantizedInput* prepared,
                               QuantizeRequest request);

}  // namespace ops

}  // namespace capstan
