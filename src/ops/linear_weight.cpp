#include "ops/linear_weight.hpp"

namespace capstan::ops {

namespace {
bool quantizes_weight_gradient(const LayerScaling* scaling) {
  return scaling && scaling->format->weight_gradient;
}
}  // namespace

LinearWeight::LinearWeight(Tape& tape, const Parameter& weight)
    : LinearWeight(tape.context(), weight, WeightRole::forward, tape.recording()) {}
LinearWeight::LinearWeight(BackwardContext& ctx, const Parameter& weight)
    : LinearWeight(ctx.context(), weight, WeightRole::input_gradient, true) {}

LinearWeight::LinearWeight(StepContext& context, const Parameter& weight, WeightRole role, bool records)
    : scaling_(context.store.scaling(weight)),
      role_(role),
      records_(records),
      pin_(context.store, weight, role),
      outputs_(weight.shape()[0]),
      inputs_(weight.shape()[1]) {}

GemmOperand LinearWeight::multiply(const Tensor& x, const Tensor& y, bool keeps, const Tensor& bias,
                                   QuantizedInput* prepared) const {
  const bool forward = role_ == WeightRole::forward;
  if (!scaling_) {
    matmul(Transpose::no, forward ? Transpose::yes : Transpose::no, x, pin_->values, y, 0, 1, bias);
    return keeps ? GemmOperand(x) : GemmOperand();
  }
  const bool columns = keeps && records_ && quantizes_weight_gradient(scaling_);
  const QuantizeRequest request{.rows = true, .columns = columns, .record_amax = records_};
  QuantizedMatrix quantized = forward ? quantize_input(*scaling_, x, prepared, request)
                                      : quantize(*scaling_, LayerTensor::output_gradient, x, request);
  // Gradients have a larger range than the values of the forward pass, and are added in fp32.
  scaled_matmul(quantized.rows, *pin_, y, 0, bias,
                forward ? kernels::Accumulation::fast : kernels::Accumulation::fp32);
  if (columns) return std::move(quantized.columns);
  return keeps ? GemmOperand(x) : GemmOperand();
}

std::shared_ptr<QuantizedInput> prepare_linear_input(Tape& tape, const Parameter* weight, int64_t rows) {
  const ParamStore& store = tape.context().store;
  const LayerScaling* scaling = weight ? store.scaling(*weight) : nullptr;
  if (!scaling) return nullptr;
  const bool columns = store.is_trainable(*weight) && tape.recording() && quantizes_weight_gradient(scaling);
  return prepare_input(tape.device(), *scaling, rows, weight->shape()[1],
                       {.rows = true, .columns = columns, .record_amax = tape.recording()});
}

GemmOperand weight_gradient_operand(StepContext& context, const Parameter& weight, LayerTensor kind,
                                    const Tensor& x) {
  const LayerScaling* scaling = context.store.scaling(weight);
  if (!quantizes_weight_gradient(scaling)) return x;
  return quantize(*scaling, kind, x, {.columns = true, .record_amax = true}).columns;
}

std::vector<Tensor> saved_tensors(const GemmOperand& x) {
  if (!x.has_scales()) return {x.values};
  return {x.values, x.scale, x.tensor_scale};
}
GemmOperand saved_operand(const BackwardContext& ctx, kernels::ScaleLayout layout, int64_t k) {
  if (layout == kernels::ScaleLayout::none) return ctx.saved(0);
  return {ctx.saved(0), ctx.saved(1), ctx.saved(2), layout, k};
}

}  // namespace capstan::ops
