// Weights that DeepSeek's releases hold in FP8 (E4M3): beside NAME of shape [rows, columns] lies
// NAME_scale_inv, fp32 [rows / 128, columns / 128] rounded up, the scales of blocks of 128 x 128 codes.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"

namespace capstan::formats {

// Rows and columns of a block.
inline constexpr int64_t kFp8Block = 128;

struct MaybeFp8Tensor : checkpoint::TensorInfo {
  // The name of the tensor with the scales; empty: the tensor is not quantized.
  std::string scales;
};

// The tensors of a source without the scales, the quantized ones as bf16: code times scale in fp32, rounded
// to nearest, as DeepSeek's own conversion does.
class Fp8Weights final : public checkpoint::MapSource<MaybeFp8Tensor> {
 public:
  // Throws ErrorCode::format for scales of another shape or type. `source` outlives the object.
  explicit Fp8Weights(checkpoint::TensorSource& source);

  std::string description() const override { return source_.description(); }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

 private:
  checkpoint::TensorSource& source_;
};

}  // namespace capstan::formats
