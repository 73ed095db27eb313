#include "parallel/nf4_weight.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "kernels/common/nf4.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::parallel {

using kernels::kNf4NestedBlock;

namespace {

constexpr std::array<float, 256> kScaleMap = kernels::nf4_scale_map();

// Code of the nearest value of the map.
uint8_t scale_code(float normalized_scale) {
  int code = 0;
  for (int step = 128; step > 0; step /= 2) {
    const auto next = static_cast<size_t>(code + step);
    if (normalized_scale > (kScaleMap[next - 1] + kScaleMap[next]) / 2) code += step;
  }
  return static_cast<uint8_t>(code);
}

// The regions of the matrix that a shard consists of, in its order.
std::vector<Region> regions_of(const Parameter& parameter) {
  const Shape& global = parameter.spec().shape;
  const Shard& shard = parameter.shard();
  CAPSTAN_ASSERT(global.rank() == 2, "`" + parameter.name() + "` " + global.text() + " in 4 bits");
  std::vector<Region> result;
  for (const ShardSegment& segment : shard.segments) {
    Region region = full_region(global);
    region.offsets[shard.dim] = segment.global;
    region.sizes[shard.dim] = segment.count;
    result.push_back(region);
  }
  return result;
}

// True where no block of elements that share a scale lies partly outside of the region.
bool has_full_blocks(const Region& region, const Shape& matrix, int64_t block) {
  const int64_t columns = region.sizes[1], end = region.offsets[0] + region.sizes[0];
  if (columns == matrix[1])
    return region.offsets[0] * columns % block == 0 && (end * columns % block == 0 || end == matrix[0]);
  return region.offsets[1] % block == 0 && columns % block == 0 && matrix[1] % block == 0;
}

}  // namespace

Tensor nf4_scale_map(Device& device) {
  return Tensor::from_host<float>(device, {256}, kScaleMap);
}

Nf4Weight::Nf4Weight(Device& device, const Parameter& parameter, const Nf4Options& options, const Tensor& map)
    : device_(&device), parameter_(&parameter), options_(options), map_(map) {
  int64_t elements = 0;
  for (const Region& region : regions_of(parameter)) {
    if (!has_full_blocks(region, parameter.spec().shape, options.block))
      fail(ErrorCode::config,
           "`" + parameter.name() + "` " + parameter.spec().shape.text() +
               ": tensor parallelism splits it inside a block of " + std::to_string(options.block) +
               " elements that share a scale",
           "set peft.quantization_block to a smaller power of two (at least 32), or choose a smaller "
           "dist.tensor_model_parallel_size");
    const int64_t count = region.sizes.elements();
    regions_.push_back({region, {elements, count}, {blocks_, ceil_div(count, options.block)}});
    elements += count;
    blocks_ += regions_.back().blocks.count;
  }
  codes_ = Tensor::zeros(device, {ceil_div(elements, int64_t{2})}, DType::u8);
  if (!options.two_stage) {
    scales_ = Tensor::zeros(device, {blocks_});
    return;
  }
  const int64_t all = ceil_div(parameter.spec().shape.elements(), options.block);
  scale_codes_ = Tensor::zeros(device, {blocks_}, DType::u8);
  nested_ = Tensor::zeros(device, {ceil_div(all, kNf4NestedBlock) + 1});
}

int64_t Nf4Weight::block_number(const LocalRegion& local, int64_t block) const {
  const int64_t element = block * options_.block;
  const int64_t row = local.region.offsets[0] + element / local.region.sizes[1],
                column = local.region.offsets[1] + element % local.region.sizes[1];
  return (row * parameter_->spec().shape[1] + column) / options_.block;
}

void Nf4Weight::set(std::span<const float> values, comm::Communicator* tensor) {
  CAPSTAN_ASSERT(static_cast<int64_t>(values.size()) == parameter_->shape().elements(),
                 "`" + parameter_->name() + "` set from " + std::to_string(values.size()) + " values");
  double bad = std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }) ? 0 : 1;
  if (tensor) bad = comm::all_reduce(*tensor, bad, comm::ReduceOp::max);
  if (bad != 0)
    fail(ErrorCode::failed,
         "`" + parameter_->name() + "` holds values that are not finite: they cannot be kept in 4 bits",
         "another checkpoint, or peft.base_quantization=none");
  Tensor found = scales_;
  {
    CategoryScope scope(MemoryCategory::workspace);
    const Tensor full = Tensor::from_host<float>(*device_, {static_cast<int64_t>(values.size())}, values);
    if (options_.two_stage) found = Tensor::empty(*device_, {blocks_});
    for (const LocalRegion& local : regions_)
      launch(*device_, device_->table().adapter->nf4_quantize,
             full.flat_range(local.elements.begin, local.elements.count, {local.elements.count}),
             local.elements.count, options_.block,
             codes_.flat_range(local.elements.begin / 2, ceil_div(local.elements.count, int64_t{2}),
                               {ceil_div(local.elements.count, int64_t{2})}),
             found.flat_range(local.blocks.begin, local.blocks.count, {local.blocks.count}));
  }
  if (options_.two_stage) set_scales(found.to_host<float>(), tensor);
}

// Every rank sees the scales of the full matrix, so that their mean and their blocks do not depend on the
// sharding.
void Nf4Weight::set_scales(const std::vector<float>& scales, comm::Communicator* tensor) {
  std::vector<double> all(static_cast<size_t>(ceil_div(parameter_->spec().shape.elements(), options_.block)));
  for (const LocalRegion& local : regions_)
    for (int64_t i = 0; i < local.blocks.count; ++i)
      all[static_cast<size_t>(block_number(local, i))] =
          static_cast<double>(scales[static_cast<size_t>(local.blocks.begin + i)]);
  if (tensor) comm::all_reduce(*tensor, all, comm::ReduceOp::max);
  double sum = 0;
  for (const double scale : all) sum += scale;
  const auto mean = static_cast<float>(sum / static_cast<double>(all.size()));

  std::vector<float> nested(static_cast<size_t>(nested_.elements()));
  nested.back() = mean;
  for (size_t i = 0; i < all.size(); ++i) {
    float& largest = nested[i / static_cast<size_t>(kNf4NestedBlock)];
    largest = std::max(largest, std::abs(static_cast<float>(all[i]) - mean));
  }
  std::vector<uint8_t> codes(scales.size());
  for (const LocalRegion& local : regions_)
    for (int64_t i = 0; i < local.blocks.count; ++i) {
      const auto here = static_cast<size_t>(local.blocks.begin + i);
      const float largest = nested[static_cast<size_t>(block_number(local, i) / kNf4NestedBlock)];
      codes[here] = scale_code((scales[here] - mean) * (1.0f / std::max(largest, 1e-38f)));
    }
  scale_codes_.copy_from_host_bytes(std::as_bytes(std::span(codes)));
  nested_.copy_from_host_bytes(std::as_bytes(std::span(nested)));
}

Tensor Nf4Weight::expand(DType type) const {
  const Tensor full = Tensor::empty(*device_, parameter_->shape(), type);
  Tensor offset;
  if (options_.two_stage) offset = nested_.flat_range(nested_.elements() - 1, 1, {1});
  const auto blocks_of = [](const LocalRegion& local, const Tensor& tensor) {
    return tensor.defined() ? tensor.flat_range(local.blocks.begin, local.blocks.count, {local.blocks.count})
                            : Tensor();
  };
  for (const LocalRegion& local : regions_)
    launch(*device_, device_->table().adapter->nf4_dequantize, local.region, parameter_->spec().shape[1],
           options_.block,
           codes_.flat_range(local.elements.begin / 2, ceil_div(local.elements.count, int64_t{2}),
                             {ceil_div(local.elements.count, int64_t{2})}),
           blocks_of(local, scales_), blocks_of(local, scale_codes_), nested_,
           options_.two_stage ? map_ : Tensor(), offset,
           full.flat_range(local.elements.begin, local.elements.count, {local.elements.count}));
  return full;
}

}  // namespace capstan::parallel
