// A frozen matrix in 4 bits (QLoRA): NF4 codes, and a scale for each block of neighboring elements
// (kernels/common/nf4.hpp).
//
// Blocks are those of the full matrix, row-major, whatever shard of it this rank holds. The same is true of
// the blocks of 256 scales and of their mean, with which scales are quantized. The values are therefore the
// same in every layout. Each expert of [experts, out, in] is a matrix of its own. The memory is, for n
// elements in blocks of b, n / 2 + 4 n / b bytes, or with quantized scales n / 2 + n / b + n / (64 b).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "kernels/adapter.hpp"
#include "ops/parameter.hpp"
#include "parallel/bucket.hpp"
#include "tensor/tensor.hpp"

namespace capstan::parallel {

struct Nf4Options {
  // Elements with one scale; a power of two from 32.
  int64_t block = 64;
  // The scales are quantized too, to 8 bits in blocks of 256.
  bool two_stage = true;
};

// The values of 8-bit scales on a device, for all its Nf4Weights.
Tensor nf4_scale_map(Device& device);

class Nf4Weight {
 public:
  // All zeros. ErrorCode::config where a boundary of the parameter's shard lies inside a block. `map`:
  // nf4_scale_map().
  Nf4Weight(Device& device, const Parameter& parameter, const Nf4Options& options, const Tensor& map);

  // Collective over `tensor`, the ranks that hold a matrix together (null: this rank holds all of it).
  // `values`: the elements of this rank's shard. ErrorCode::failed on all ranks if a value is not finite.
  void set(std::span<const float> values, comm::Communicator* tensor);
  // The local shard, contiguous, in `type`.
  Tensor expand(DType type) const;

  const Parameter& parameter() const { return *parameter_; }
  // The stored tensors, in the order of the shard. With Nf4Options::two_stage, scale_codes and nested [local
  // matrices, blocks of scales + 1] (in the last column the mean of the scales) are defined, else scales.
  const Tensor& codes() const { return codes_; }
  const Tensor& scales() const { return scales_; }
  const Tensor& scale_codes() const { return scale_codes_; }
  const Tensor& nested() const { return nested_; }

 private:
  // A region of a matrix; its blocks are consecutive in the shard.
  struct LocalRegion {
    // Index among this rank's matrices.
    int64_t matrix = 0;
    Region region;
    // Elements, bytes of codes and blocks of the region within the shard.
    FlatRange elements, codes, blocks;
  };
  // Blocks of a full matrix.
  int64_t matrix_blocks() const;
  // The index in the matrix of a block of the region.
  int64_t block_number(const LocalRegion& local, int64_t block) const;
  void set_scales(const std::vector<float>& scales, comm::Communicator* tensor);

  Device* device_;
  const Parameter* parameter_;
  // [out, in].
  Shape matrix_;
  Nf4Options options_;
  std::vector<LocalRegion> regions_;
  // Number of blocks of this shard.
  int64_t blocks_ = 0;
  Tensor codes_, scales_, scale_codes_, nested_, map_;
};

}  // namespace capstan::parallel
