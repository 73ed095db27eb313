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
    const size_t next = static_cast<size_t>(code) + static_cast<size_t>(step);
    if (normalized_scale > (kScaleMap[next - 1] + kScaleMap[next]) / 2) code += step;
  }
  return static_cast<uint8_t>(code);
}

// The matrix of a weight; of experts, which have one each, the matrix of one.
Shape matrix_of(const Parameter& parameter) {
  const Shape& global = parameter.spec().shape;
  CAPSTAN_ASSERT(global.rank() == 2 || global.rank() == 3,
                 "`" + parameter.name() + "` " + global.text() + " in 4 bits");
  return {global[global.rank() - 2], global[global.rank() - 1]};
}

// The regions of a matrix that a shard consists of, in its order. A shard of experts has these of each of
// its experts.
std::vector<Region> regions_of(const Parameter& parameter) {
  const Shape matrix = matrix_of(parameter);
  const Shard& shard = parameter.shard();
  const int dim = shard.dim - (parameter.spec().shape.rank() - 2);
  if (dim < 0) return {full_region(matrix)};
  std::vector<Region> result;
  for (const ShardSegment& segment : shard.segments) {
    Region region = full_region(matrix);
    region.offsets[dim] = segment.global;
    region.sizes[dim] = segment.count;
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

Tensor part_of(const Tensor& tensor, const FlatRange& range) {
  return tensor.defined() ? tensor.flat_range(range.begin, range.count, {range.count}) : Tensor();
}

}  // namespace

Tensor nf4_scale_map(Device& device) {
  return Tensor::from_host<float>(device, {256}, kScaleMap);
}

Nf4Weight::Nf4Weight(Device& device, const Parameter& parameter, const Nf4Options& options, const Tensor& map)
    : device_(&device), parameter_(&parameter), matrix_(matrix_of(parameter)), options_(options), map_(map) {
  const int64_t matrices = parameter.shape().rank() == 3 ? parameter.shape()[0] : 1;
  int64_t elements = 0, bytes = 0;
  for (int64_t matrix = 0; matrix < matrices; ++matrix)
    for (const Region& region : regions_of(parameter)) {
      if (!has_full_blocks(region, matrix_, options.block))
        fail(ErrorCode::config,
             "`" + parameter.name() + "` " + parameter.spec().shape.text() +
                 ": tensor parallelism splits it inside a block of " + std::to_string(options.block) +
                 " elements that share a scale",
             "set peft.quantization_block to a smaller power of two (at least 32), or choose a smaller "
             "dist.tensor_model_parallel_size");
      const int64_t count = region.sizes.elements();
      const int64_t of_codes = ceil_div(count, int64_t{2}), blocks = ceil_div(count, options.block);
      regions_.push_back({matrix, region, {elements, count}, {bytes, of_codes}, {blocks_, blocks}});
      elements += count, bytes += of_codes, blocks_ += blocks;
    }
  codes_ = Tensor::zeros(device, {bytes}, DType::u8);
  if (!options.two_stage) {
    scales_ = Tensor::zeros(device, {blocks_});
    return;
  }
  scale_codes_ = Tensor::zeros(device, {blocks_}, DType::u8);
  nested_ = Tensor::zeros(device, {matrices, ceil_div(matrix_blocks(), kNf4NestedBlock) + 1});
}

int64_t Nf4Weight::matrix_blocks() const {
  return ceil_div(matrix_.elements(), options_.block);
}
int64_t Nf4Weight::block_number(const LocalRegion& local, int64_t block) const {
  const int64_t element = block * options_.block;
  const int64_t row = local.region.offsets[0] + element / local.region.sizes[1],
                column = local.region.offsets[1] + element % local.region.sizes[1];
  return (row * matrix_[1] + column) / options_.block;
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
    if (options_.two_stage) found = Tensor::empty(*device_, {blocks_});
    for (const LocalRegion& local : regions_) {
      const auto& [begin, count] = local.elements;
      const Tensor x = Tensor::from_host<float>(
          *device_, {count}, values.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)));
      launch(*device_, device_->table().adapter->nf4_quantize, x, count, options_.block,
             part_of(codes_, local.codes), part_of(found, local.blocks));
    }
  }
  if (options_.two_stage) set_scales(found.to_host<float>(), tensor);
}

// Every rank sees the scales of full matrices, so that their means and their blocks do not depend on the
// sharding.
void Nf4Weight::set_scales(const std::vector<float>& scales, comm::Communicator* tensor) {
  const int64_t of_matrix = matrix_blocks(), matrices = nested_.size(0);
  std::vector<double> all(static_cast<size_t>(matrices * of_matrix));
  for (const LocalRegion& local : regions_)
    for (int64_t i = 0; i < local.blocks.count; ++i)
      all[static_cast<size_t>(local.matrix * of_matrix + block_number(local, i))] =
          static_cast<double>(scales[static_cast<size_t>(local.blocks.begin + i)]);
  if (tensor) comm::all_reduce(*tensor, all, comm::ReduceOp::max);

  std::vector<float> nested(static_cast<size_t>(nested_.elements()));
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    const auto own =
        std::span(all).subspan(static_cast<size_t>(matrix * of_matrix), static_cast<size_t>(of_matrix));
    const auto largest = std::span(nested).subspan(static_cast<size_t>(matrix * nested_.size(1)),
                                                   static_cast<size_t>(nested_.size(1)));
    double sum = 0;
    for (const double scale : own) sum += scale;
    const auto mean = static_cast<float>(sum / static_cast<double>(own.size()));
    largest.back() = mean;
    for (size_t i = 0; i < own.size(); ++i) {
      float& of_block = largest[i / static_cast<size_t>(kNf4NestedBlock)];
      of_block = std::max(of_block, std::abs(static_cast<float>(own[i]) - mean));
    }
  }
  std::vector<uint8_t> codes(scales.size());
  for (const LocalRegion& local : regions_) {
    const float* const largest = nested.data() + local.matrix * nested_.size(1);
    const float mean = largest[nested_.size(1) - 1];
    for (int64_t i = 0; i < local.blocks.count; ++i) {
      const auto here = static_cast<size_t>(local.blocks.begin + i);
      const float range = largest[block_number(local, i) / kNf4NestedBlock];
      codes[here] = scale_code((scales[here] - mean) * (1.0f / std::max(range, 1e-38f)));
    }
  }
  scale_codes_.copy_from_host_bytes(std::as_bytes(std::span(codes)));
  nested_.copy_from_host_bytes(std::as_bytes(std::span(nested)));
}

Tensor Nf4Weight::expand(DType type) const {
  Tensor full = Tensor::empty(*device_, parameter_->shape(), type);
  for (const LocalRegion& local : regions_) {
    const int64_t nested = options_.two_stage ? nested_.size(1) : 0, first = local.matrix * nested;
    launch(*device_, device_->table().adapter->nf4_dequantize, local.region, matrix_[1], options_.block,
           part_of(codes_, local.codes), part_of(scales_, local.blocks), part_of(scale_codes_, local.blocks),
           part_of(nested_, {first, nested}), options_.two_stage ? map_ : Tensor(),
           part_of(nested_, {first + nested - 1, 1}), part_of(full, local.elements));
  }
  return full;
}

}  // namespace capstan::parallel
