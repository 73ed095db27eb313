#include "ops/low_precision.hpp"

#include <utility>

#include "base/checked.hpp"
#include "kernels/table.hpp"
#include "tensor/float8.hpp"

namespace capstan::ops {

using kernels::ScaleLayout;

namespace {

kernels::QuantizeFormat format_of(const LowPrecision& format, LayerTensor kind) {
  const bool weight = kind == LayerTensor::weight;
  const DType codes = kind == LayerTensor::output_gradient ? format.gradient : format.forward;
  switch (format.recipe) {
    case ScalingRecipe::delayed:
    case ScalingRecipe::tensorwise:
      return {codes, ScaleLayout::tensor};
    case ScalingRecipe::blockwise:
      return {codes, weight ? ScaleLayout::block_128x128 : ScaleLayout::block_1x128};
    case ScalingRecipe::mxfp8:
      return {codes, ScaleLayout::block_1x32};
    case ScalingRecipe::nvfp4:
      break;
  }
  return {.codes = codes,
          .layout = ScaleLayout::block_1x16,
          .square = weight,
          .hadamard = !weight,
          .stochastic = kind == LayerTensor::output_gradient};
}

bool has_tensor_scale(const kernels::QuantizeFormat& format) {
  return format.layout == ScaleLayout::tensor || format.layout == ScaleLayout::block_1x16;
}

// Computes the scale of x from its maximum `known`, which it sets to 0. If `known` is undefined, first
// computes the maximum of x or of its transformed columns.
Tensor current_scale(const kernels::QuantizeFormat& format, const kernels::QuantizeShape& shape,
                     const Tensor& x, bool hadamard, const Tensor& known = {}) {
  Device& device = x.device();
  const kernels::Quantize& kernels = *device.table().quantize;
  const Tensor amax = known.defined() ? known : Tensor::zeros(device, {1}),
               scale = Tensor::empty(device, {2});
  if (!known.defined()) launch(device, kernels.absolute_maximum, x, shape, hadamard, amax);
  launch(device, kernels.current_scale, amax, scale, 1, scale_numerator(format.layout, format.codes));
  return scale;
}

// Whether the scale of the tensor is that of earlier steps, or of the weights of this one.
bool keeps_scale(const LayerScaling& scaling, LayerTensor kind) {
  return scaling.format->recipe == ScalingRecipe::delayed || kind == LayerTensor::weight;
}
Tensor kept_scale(const LayerScaling& scaling, LayerTensor kind) {
  return scaling.scale.flat_range(2 * static_cast<int64_t>(kind), 2, {2});
}
// The value in which the maximum is recorded; undefined: it is not recorded.
Tensor recorded_amax(const LayerScaling& scaling, LayerTensor kind, const QuantizeRequest& request) {
  const bool records = scaling.amax.defined() && request.record_amax;
  return records ? scaling.amax.flat_range(static_cast<int64_t>(kind), 1, {1}) : Tensor();
}

// {scale, inverse} of the two results.
struct TensorScales {
  Tensor rows, columns;
};
TensorScales tensor_scales(const LayerScaling& scaling, LayerTensor kind,
                           const kernels::QuantizeFormat& format, const kernels::QuantizeShape& shape,
                           const Tensor& x, const QuantizeRequest& request, const Tensor& known_amax) {
  if (!has_tensor_scale(format)) return {};
  if (keeps_scale(scaling, kind)) {
    const Tensor kept = kept_scale(scaling, kind);
    return {kept, kept};
  }
  TensorScales scales;
  if (request.rows || !format.hadamard) scales.rows = current_scale(format, shape, x, false, known_amax);
  if (!request.columns) return scales;
  scales.columns = format.hadamard ? current_scale(format, shape, x, true) : scales.rows;
  return scales;
}

// Codes and scales of a matrix [rows, cols]; undefined unless wanted.
GemmOperand empty_operand(Device& device, const kernels::QuantizeFormat& format, int64_t rows, int64_t cols,
                          const Tensor& tensor_scale, bool wanted) {
  if (!wanted) return {};
  GemmOperand x;
  x.layout = format.layout;
  x.k = cols;
  const bool pairs = format.codes == DType::f4e2m1x2;
  x.values = Tensor::empty(device, {rows, pairs ? ceil_div(cols, int64_t{2}) : cols}, format.codes);
  const Tensor inverse = tensor_scale.defined() ? tensor_scale.flat_range(1, 1, {1}) : Tensor();
  if (format.layout == ScaleLayout::tensor) {
    x.scale = inverse;
    return x;
  }
  x.tensor_scale = inverse;
  const kernels::BlockScales scales{format.layout, device.table().scale_order, rows, cols};
  x.scale = Tensor::empty(device, {scales.elements()}, kernels::block_scale_type(format.layout));
  return x;
}

// known_amax: the maximum of x; undefined: not known.
QuantizedMatrix quantize_matrix(const LayerScaling& scaling, LayerTensor kind, const Tensor& x,
                                QuantizeRequest request, const Tensor& known_amax) {
  CAPSTAN_ASSERT(x.rank() == 2 && (x.stride(1) == 1 || x.size(1) <= 1), "quantize: " + x.text());
  Device& device = x.device();
  const kernels::QuantizeFormat format = format_of(*scaling.format, kind);
  const kernels::QuantizeShape shape{x.size(0), x.size(1), x.stride(0)};
  const TensorScales scales = tensor_scales(scaling, kind, format, shape, x, request, known_amax);
  QuantizedMatrix result{
      empty_operand(device, format, shape.rows, shape.cols, scales.rows, request.rows),
      empty_operand(device, format, shape.cols, shape.rows, scales.columns, request.columns)};
  const kernels::RoundingPosition random{
      scaling.rounding, format.stochastic && scaling.rounding_calls ? (*scaling.rounding_calls)++ : 0};
  launch(device, device.table().quantize->quantize, format, shape, x, scales.rows, result.rows,
         scales.columns, result.columns, recorded_amax(scaling, kind, request), random);
  return result;
}

}  // namespace

float scale_numerator(ScaleLayout layout, DType codes) {
  return layout == ScaleLayout::block_1x16 ? largest_of(DType::f8e4m3) * largest_of(codes)
                                           : largest_of(codes);
}

QuantizedMatrix quantize(const LayerScaling& scaling, LayerTensor kind, const Tensor& x,
                         QuantizeRequest request) {
  return quantize_matrix(scaling, kind, x, request, {});
}

std::shared_ptr<QuantizedInput> prepare_input(Device& device, const LayerScaling& scaling, int64_t rows,
                                              int64_t cols, QuantizeRequest request) {
  constexpr LayerTensor kKind = LayerTensor::input;
  auto prepared = std::make_shared<QuantizedInput>();
  prepared->scaling = &scaling;
  QuantizedOutputTensors& output = prepared->output;
  output.format = format_of(*scaling.format, kKind);
  if (has_tensor_scale(output.format) && !keeps_scale(scaling, kKind)) {
    output.amax = Tensor::zeros(device, {1});
    return prepared;
  }
  if (has_tensor_scale(output.format)) output.tensor_scale = kept_scale(scaling, kKind);
  output.rows = empty_operand(device, output.format, rows, cols, output.tensor_scale, request.rows);
  output.columns = empty_operand(device, output.format, cols, rows, output.tensor_scale, request.columns);
  output.amax = recorded_amax(scaling, kKind, request);
  return prepared;
}

QuantizedMatrix quantize_input(const LayerScaling& scaling, const Tensor& x, QuantizedInput* prepared,
                               QuantizeRequest request) {
  QuantizedOutputTensors output;
  if (prepared && prepared->scaling == &scaling) output = std::exchange(prepared->output, {});
  if (output.rows.values.defined() && (!request.columns || output.columns.values.defined()))
    return {std::move(output.rows), std::move(output.columns)};
  const bool of_tensor = !keeps_scale(scaling, LayerTensor::input);
  return quantize_matrix(scaling, LayerTensor::input, x, request, of_tensor ? output.amax : Tensor());
}

}  // namespace capstan::ops
