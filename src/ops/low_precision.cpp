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
  return {codes, ScaleLayout::block_1x16, weight};
}

bool has_tensor_scale(const kernels::QuantizeFormat& format) {
  return format.layout == ScaleLayout::tensor || format.layout == ScaleLayout::block_1x16;
}

// From the maximum of x.
Tensor current_scale(const kernels::QuantizeFormat& format, const kernels::QuantizeShape& shape,
                     const Tensor& x) {
  Device& device = x.device();
  const kernels::Quantize& kernels = *device.table().quantize;
  const Tensor amax = Tensor::zeros(device, {1}), scale = Tensor::empty(device, {2});
  launch(device, kernels.absolute_maximum, x, shape, amax);
  launch(device, kernels.current_scale, amax, scale, 1, largest_of_tensor(format.layout, format.codes));
  return scale;
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
  const bool delayed = scaling.format->recipe == ScalingRecipe::delayed;
  const auto index = static_cast<int64_t>(kind);
  Tensor tensor_scale;
  if (has_tensor_scale(format))
    tensor_scale = delayed || kind == LayerTensor::weight ? scaling.scale.flat_range(2 * index, 2, {2})
                                                          : current_scale(format, shape, x);
  QuantizedMatrix result{
      empty_operand(device, format, shape.rows, shape.cols, tensor_scale, request.rows),
      empty_operand(device, format, shape.cols, shape.rows, tensor_scale, request.columns)};
  const Tensor amax = delayed && request.record_amax ? scaling.amax.flat_range(index, 1, {1}) : Tensor();
  launch(device, device.table().quantize->quantize, format, shape, x, tensor_scale, result.rows,
         result.columns, amax);
  return result;
}

}  // namespace capstan::ops
