// Weights that gpt-oss releases hold in MXFP4 (OCP Microscaling Formats, version 1.0): for a tensor NAME of
// shape [experts, in, out] the file has NAME_blocks, u8 [experts, out, in / 32, 16], whose bytes hold two
// E2M1 codes each, the first one in the low bits, and NAME_scales, u8 [experts, out, in / 32], one E8M0
// exponent for each 32 codes.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"

namespace capstan::formats {

// Codes of a block, which has one scale.
inline constexpr int64_t kMxfp4Block = 32;

struct MaybeMxfp4Tensor : checkpoint::TensorInfo {
  // The names of the tensors with codes and scales; empty: the tensor is not quantized.
  std::string blocks, scales;
};

// The tensors of a source, of which those in MXFP4 are bf16 [experts, in, out] under their NAME: code times
// 2^(scale - 127), as Transformers dequantizes them.
class Mxfp4Weights final : public checkpoint::MapSource<MaybeMxfp4Tensor> {
 public:
  // Throws ErrorCode::format for blocks and scales that do not fit each other. `source` outlives the object.
  explicit Mxfp4Weights(checkpoint::TensorSource& source);

  std::string description() const override { return source_.description(); }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

 private:
  checkpoint::TensorSource& source_;
};

}  // namespace capstan::formats
