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
  LinearWeight(BackwardStep& step, const Parameter& weight);

  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  // x: rows of the layer's input (or of its output's gradient), y: of the result. With `keeps` returns x as
  // the weight gradient takes it, which is quantized in the same launch; x itself where the tape does not
  // record.
  GemmOperand multiply(const Tensor& x, const Tensor& y, bool keeps = false,
                       const GemmEpilogueTensors& epilogue = {}) const;

 private:
  LinearWeight(StepContext& context, const Parameter& weight, WeightRole role, bool records);
  const LayerScaling* scaling_;
  WeightRole role_;
  bool records_;
  OperandPin pin_;
  int64_t outputs_, inputs_;
};

// x [N, in] or dy [N, out] as the weight gradient takes it: itself, or quantized along N.
GemmOperand weight_gradient_operand(StepContext& context, const Parameter& weight, LayerTensor kind,
                                    const Tensor& x);

// An operand among the tensors that an operation saves for its backward pass.
std::vector<Tensor> saved_tensors(const GemmOperand& x);
// k: see GemmOperand.
GemmOperand saved_operand(const BackwardStep& step, kernels::ScaleLayout layout, int64_t k);

}  // namespace capstan::ops
