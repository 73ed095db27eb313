#include "parallel/low_precision.hpp"

#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "tensor/float8.hpp"
#include "tensor/launch.hpp"

namespace capstan::parallel {

namespace {
// Scaled tensors of a layer.
constexpr int64_t kTensors = 3;
constexpr auto kWeight = static_cast<int64_t>(LayerTensor::weight);
}  // namespace

LowPrecisionWeights::LowPrecisionWeights(Device& device,
                                         std::span<const std::unique_ptr<Parameter>> parameters,
                                         std::vector<comm::Communicator*> groups,
                                         const LowPrecisionOptions& options)
    : device_(device), groups_(std::move(groups)), options_(options), index_(parameters.size(), -1) {
  for (const auto& parameter : parameters)
    if (options_.covers(*parameter)) {
      index_[static_cast<size_t>(parameter->index())] = static_cast<int>(covered_.size());
      covered_.push_back(parameter.get());
    }
  const auto count = static_cast<int64_t>(covered_.size());
  const int64_t tensors = kTensors * count;
  CategoryScope scope(MemoryCategory::parameters);
  const std::vector<float> ones(static_cast<size_t>(2 * tensors), 1.0f);
  scale_ = Tensor::from_host<float>(device_, {count, kTensors, 2}, ones);
  amax_ = Tensor::zeros(device_, {count, kTensors});
  if (delayed()) history_ = Tensor::zeros(device_, {count, kTensors, options_.history_length});
  layers_.resize(covered_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto first = static_cast<int64_t>(i) * kTensors;
    layers_[i].scaling.format = &options_.format;
    layers_[i].scaling.scale = scale_.flat_range(2 * first, 2 * kTensors, {kTensors, 2});
    layers_[i].scaling.rounding_calls = &rounding_calls_;
    if (delayed()) layers_[i].scaling.amax = amax_.flat_range(first, kTensors, {kTensors});
  }
}

LowPrecisionWeights::Layer& LowPrecisionWeights::layer(const Parameter& parameter) {
  return layers_[static_cast<size_t>(index_[static_cast<size_t>(parameter.index())])];
}
const LowPrecisionWeights::Layer& LowPrecisionWeights::layer(const Parameter& parameter) const {
  return layers_[static_cast<size_t>(index_[static_cast<size_t>(parameter.index())])];
}

const LayerScaling* LowPrecisionWeights::scaling(const Parameter& parameter) const {
  return index_[static_cast<size_t>(parameter.index())] < 0 ? nullptr : &layer(parameter).scaling;
}

GemmOperand LowPrecisionWeights::operand(const Parameter& parameter, WeightRole role, const Tensor& values) {
  Layer& own = layer(parameter);
  GemmOperand& kept = own.operands[static_cast<size_t>(role)];
  if (kept.values.defined()) return kept;
  CategoryScope scope(MemoryCategory::parameters);
  if (values.rank() == 3) {
    const Tensor matrix = values.view({values.size(0) * values.size(1), values.size(2)});
    GemmOperand& codes = own.operands[static_cast<size_t>(WeightRole::forward)];
    if (!codes.values.defined())
      codes =
          ops::quantize(own.scaling, LayerTensor::weight, matrix, {.rows = true, .record_amax = true}).rows;
    if (role == WeightRole::input_gradient)
      kept = {transposed(codes.values.view(values.shape())), codes.scale, {}, codes.layout, values.size(1)};
    return kept;
  }
  const bool forward = role == WeightRole::forward;
  ops::QuantizedMatrix made = ops::quantize(own.scaling, LayerTensor::weight, values,
                                            {.rows = forward, .columns = !forward, .record_amax = true});
  kept = std::move(forward ? made.rows : made.columns);
  return kept;
}

Tensor LowPrecisionWeights::transposed(const Tensor& codes) const {
  const int rank = codes.rank();
  const int64_t out = codes.size(rank - 2), in = codes.size(rank - 1),
                matrices = codes.elements() / (out * in);
  Tensor result = Tensor::empty(device_, {matrices * in, out}, codes.dtype());
  for (int64_t i = 0; i < matrices; ++i)
    launch(device_, device_.table().quantize->transpose_codes,
           codes.flat_range(i * out * in, out * in, {out, in}), result.slice(0, i * in, in), out, in);
  return result;
}

void LowPrecisionWeights::encode(const Parameter& parameter, const Tensor& values, const Tensor& codes) {
  GemmOperand rows;
  rows.values = codes, rows.layout = kernels::ScaleLayout::tensor;
  const Tensor scale = layer(parameter).scaling.scale.flat_range(2 * kWeight, 2, {2});
  launch(device_, device_.table().quantize->quantize,
         kernels::QuantizeFormat{options_.format.forward, kernels::ScaleLayout::tensor},
         kernels::QuantizeShape{1, values.elements(), values.elements()}, values, scale, rows, Tensor(),
         GemmOperand(), Tensor(), kernels::RoundingPosition{});
}

GemmOperand LowPrecisionWeights::operand_of_codes(const Parameter& parameter, WeightRole role,
                                                  const Tensor& codes) {
  Layer& own = layer(parameter);
  const Tensor inverse = own.scaling.scale.flat_range(2 * kWeight + 1, 1, {1});
  const int64_t out = codes.size(codes.rank() - 2), in = codes.size(codes.rank() - 1);
  if (role == WeightRole::forward) return {codes, inverse, {}, kernels::ScaleLayout::tensor, in};
  GemmOperand& kept = own.operands[static_cast<size_t>(role)];
  if (kept.values.defined()) return kept;
  CategoryScope scope(MemoryCategory::parameters);
  kept = {transposed(codes), inverse, {}, kernels::ScaleLayout::tensor, out};
  return kept;
}

void LowPrecisionWeights::drop(const Parameter& parameter) {
  if (scaling(parameter))
    for (GemmOperand& kept : layer(parameter).operands) kept = {};
}
void LowPrecisionWeights::drop_all() {
  for (const Parameter* parameter : covered_) drop(*parameter);
}

void LowPrecisionWeights::raise_maximum(size_t i, const Tensor& values) {
  if (values.defined())
    launch(device_, device_.table().quantize->absolute_maximum, values,
           kernels::QuantizeShape{1, values.elements(), values.elements()}, false,
           amax_.flat_range(kTensors * static_cast<int64_t>(i) + kWeight, 1, {1}));
}

void LowPrecisionWeights::reduce_over_ranks(const Tensor& amax) const {
  for (comm::Communicator* group : groups_)
    if (group) comm::all_reduce_max(*group, amax, "maxima for scales");
}

void LowPrecisionWeights::measure_weights(const std::function<bool(const Parameter&)>& changed,
                                          const std::function<Tensor(const Parameter&)>& held) {
  const ScalingRecipe recipe = options_.format.recipe;
  const bool measured = recipe == ScalingRecipe::tensorwise || recipe == ScalingRecipe::nvfp4;
  const kernels::Quantize& kernels = *device_.table().quantize;
  // Indices of the maxima and scales that change.
  std::vector<int64_t> changed_at;
  for (size_t i = 0; i < covered_.size(); ++i) {
    // With delayed scaling advance() has changed the scales of all weights.
    if (!delayed() && !changed(*covered_[i])) continue;
    drop(*covered_[i]);
    if (!measured) continue;
    changed_at.push_back(kTensors * static_cast<int64_t>(i) + kWeight);
    raise_maximum(i, held(*covered_[i]));
  }
  if (changed_at.empty()) return;
  reduce_over_ranks(amax_);
  const auto layout =
      recipe == ScalingRecipe::nvfp4 ? kernels::ScaleLayout::block_1x16 : kernels::ScaleLayout::tensor;
  const float largest = ops::scale_numerator(layout, options_.format.forward);
  if (changed_at.size() == covered_.size())
    return launch(device_, kernels.current_scale, amax_, scale_, amax_.elements(), largest);
  for (const int64_t at : changed_at)
    launch(device_, kernels.current_scale, amax_.flat_range(at, 1, {1}), scale_.flat_range(2 * at, 2, {2}), 1,
           largest);
}

void LowPrecisionWeights::begin_step(int64_t step, const std::function<Tensor(const Parameter&)>& held) {
  int64_t rank = 0;
  for (const comm::Communicator* group : groups_) rank = rank * comm::ranks_of(group) + comm::rank_in(group);
  rounding_calls_ = static_cast<uint64_t>(rank) << 40;
  for (size_t i = 0; i < layers_.size(); ++i)
    layers_[i].scaling.rounding =
        philox_key(options_.seed, purpose::quantization,
                   random_sequence_of(covered_[i]->name()) + static_cast<uint64_t>(step));
  if (!delayed()) return;
  // The maximum of a weight is taken when it is quantized, of one that is gathered as codes here.
  drop_all();
  launch(device_, device_.table().elementwise->fill, amax_, 0.0f, amax_.elements());
  for (size_t i = 0; i < covered_.size(); ++i) raise_maximum(i, held(*covered_[i]));
}

void LowPrecisionWeights::advance(const Tensor& control) {
  if (!delayed()) return;
  reduce_over_ranks(amax_);
  launch(device_, device_.table().quantize->delayed_scale, control, amax_, history_, scale_,
         static_cast<int64_t>(covered_.size()),
         kernels::Quantize::DelayedScaling{.history_length = options_.history_length,
                                           .maximum = options_.maximum_of_history,
                                           .margin = options_.margin,
                                           .format_max = largest_of(options_.format.forward),
                                           .gradient_format_max = largest_of(options_.format.gradient)});
}

Tensor LowPrecisionWeights::history(const Parameter& parameter) const {
  const int64_t elements = kTensors * options_.history_length,
                index = index_[static_cast<size_t>(parameter.index())];
  if (!delayed() || index < 0) return {};
  return history_.flat_range(index * elements, elements, {elements});
}
Tensor LowPrecisionWeights::scale(const Parameter& parameter) const {
  const int64_t index = index_[static_cast<size_t>(parameter.index())];
  if (!delayed() || index < 0) return {};
  return scale_.flat_range(index * 2 * kTensors, 2 * kTensors, {2 * kTensors});
}

}  // namespace capstan::parallel
