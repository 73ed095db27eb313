// The weight of a linear layer in one of its two uses, and the GEMM with it in the number format that the
// parameter store has for the layer.
#pragma once

#include <vector>

#include "ops/matmul.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

class LinearWeight {
 public:
  // y = x W^T. Delayed scaling counts maxima only where the tape records.
  LinearWeight(Tape& tape, const Parameter& weight);
  // dx = dy W.
  LinearWeight(BackwardContext& ctx, const Parameter& weight);

  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  // x: rows of the layer's input (or of its output's gradient), y: of the result. With `keeps` returns x as
  // the weight gradient takes it, which is quantized in the same launch; x itself where the tape does not
  // record. `prepared`: see prepare_linear_input(); null where the rows are not all of the layer's input.
  GemmOperand multiply(const Tensor& x, const Tensor& y, bool keeps = false, const Tensor& bias = {},
                       QuantizedInput* prepared = nullptr) const;

 private:
  LinearWeight(StepContext& context, const Parameter& weight, WeightRole role, bool records);
  const LayerScaling* scaling_;
  WeightRole role_;
  bool records_;
  OperandPin pin_;
  int64_t outputs_, inputs_;
};

// For the operation that computes x [rows, in], the input of the linear layer with `weight`: what it writes
// for this layer's GEMMs besides x, and leaves in Var::quantized. Null where the layer is in the compute type
// or `weight` is null.
std::shared_ptr<QuantizedInput> prepare_linear_input(Tape& tape, const Parameter* weight, int64_t rows);

// x [N, in] or dy [N, out] as the weight gradient takes it: itself, or quantized along N.
GemmOperand weight_gradient_operand(StepContext& context, const Parameter& weight, LayerTensor kind,
                                    const Tensor& x);

// An operand among the tensors that an operation saves for its backward pass.
std::vector<Tensor> saved_tensors(const GemmOperand& x);
// k: see GemmOperand.
GemmOperand saved_operand(const BackwardContext& ctx, kernels::ScaleLayout layout, int64_t k);

}  // namespace capstan::ops
