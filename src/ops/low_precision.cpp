#include "ops/low_precision.hpp"

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

// From the maximum of x, or of its transformed columns.
Tensor current_scale(const kernels::QuantizeFormat& format, const kernels::QuantizeShape& shape,
                     const Tensor& x, bool hadamard) {
  Device& device = x.device();
  const kernels::Quantize& kernels = *device.table().quantize;
  const Tensor amax = Tensor::zeros(device, {1}), scale = Tensor::empty(device, {2});
  launch(device, kernels.absolute_maximum, x, shape, hadamard, amax);
  launch(device, kernels.current_scale, amax, scale, 1, largest_of_tensor(format.layout, format.codes));
  return scale;
}

// {scale, inverse} of the two results.
struct TensorScales {
  Tensor rows, columns;
};
TensorScales tensor_scales(const LayerScaling& scaling, LayerTensor kind,
                           const kernels::QuantizeFormat& format, const kernels::QuantizeShape& shape,
                           const Tensor& x, const QuantizeRequest& request) {
  if (!has_tensor_scale(format)) return {};
  if (scaling.format->recipe == ScalingRecipe::delayed || kind == LayerTensor::weight) {
    const Tensor kept = scaling.scale.flat_range(2 * static_cast<int64_t>(kind), 2, {2});
    return {kept, kept};
  }
  TensorScales scales;
  if (request.rows || !format.hadamard) scales.rows = current_scale(format, shape, x, false);
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
  const int64_t blocks = ceil_div(cols, kernels::block_of(format.layout)),
                scale_rows =
                    format.layout == ScaleLayout::block_128x128 ? ceil_div(rows, int64_t{128}) : rows;
  const DType type = format.layout == ScaleLayout::block_1x32   ? DType::f8e8m0
                     : format.layout == ScaleLayout::block_1x16 ? DType::f8e4m3
                                                                : DType::f32;
  x.scale = Tensor::empty(device, {scale_rows, blocks}, type);
  return x;
}

}  // namespace

float largest_of_tensor(ScaleLayout layout, DType codes) {
  return layout == ScaleLayout::block_1x16 ? largest_of(DType::f8e4m3) * largest_of(codes)
                                           : largest_of(codes);
}

QuantizedMatrix quantize(const LayerScaling& scaling, LayerTensor kind, const Tensor& x,
                         QuantizeRequest request) {
  CAPSTAN_ASSERT(x.rank() == 2 && (x.stride(1) == 1 || x.size(1) <= 1), "quantize: " + x.text());
  Device& device = x.device();
  const kernels::QuantizeFormat format = format_of(*scaling.format, kind);
  const kernels::QuantizeShape shape{x.size(0), x.size(1), x.stride(0)};
  const TensorScales scales = tensor_scales(scaling, kind, format, shape, x, request);
  QuantizedMatrix result{
      empty_operand(device, format, shape.rows, shape.cols, scales.rows, request.rows),
      empty_operand(device, format, shape.cols, shape.rows, scales.columns, request.columns)};
  const bool records = scaling.amax.defined() && request.record_amax;
  const Tensor amax = records ? scaling.amax.flat_range(static_cast<int64_t>(kind), 1, {1}) : Tensor();
  const kernels::RoundingPosition random{
      scaling.rounding, format.stochastic && scaling.rounding_calls ? (*scaling.rounding_calls)++ : 0};
  launch(device, device.table().quantize->quantize, format, shape, x, scales.rows, result.rows,
         scales.columns, result.columns, amax, random);
  return result;
}

}  // namespace capstan::ops
