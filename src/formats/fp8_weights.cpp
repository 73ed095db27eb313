#include "formats/fp8_weights.hpp"

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "tensor/float8.hpp"

namespace capstan::formats {

using checkpoint::TensorInfo;

namespace {

constexpr std::string_view kScales = "_scale_inv";

// The blocks that a region touches.
Region blocks_of(const Region& wanted) {
  Region blocks;
  for (size_t d = 0; d < wanted.sizes.size(); ++d) {
    blocks.offsets.push_back(wanted.offsets[d] / kFp8Block);
    blocks.sizes.push_back(ceil_div(wanted.offsets[d] + wanted.sizes[d], kFp8Block) - blocks.offsets[d]);
  }
  return blocks;
}

}  // namespace

Fp8Weights::Fp8Weights(checkpoint::TensorSource& source) : source_(source) {
  for (const std::string& name : source.names()) {
    const TensorInfo& info = source.at(name);
    const TensorInfo* scales = source.find(name + std::string(kScales));
    if (info.dtype != DType::f8e4m3 || !scales) {
      tensors_.emplace(name, MaybeFp8Tensor{info, {}});
      continue;
    }
    const bool matrix = info.shape.size() == 2;
    const Shape expected =
        matrix ? Shape{ceil_div(info.shape[0], kFp8Block), ceil_div(info.shape[1], kFp8Block)} : Shape{};
    if (!matrix || scales->dtype != DType::f32 || scales->shape != expected)
      fail(ErrorCode::format, source.description() + ": " + in_quotes(name + std::string(kScales)) + " is " +
                                  scales->shape.text() + " in " + std::string(name_of(scales->dtype)) +
                                  ", and the blocks of " + in_quotes(name) + " " + info.shape.text() +
                                  " need " + expected.text() + " in fp32");
    tensors_.emplace(name, MaybeFp8Tensor{{DType::bf16, info.shape}, name + std::string(kScales)});
  }
  std::erase_if(tensors_, [&](const auto& tensor) {
    const std::string_view name = tensor.first;
    if (!name.ends_with(kScales)) return false;
    const auto weight = tensors_.find(name.substr(0, name.size() - kScales.size()));
    return weight != tensors_.end() && !weight->second.scales.empty();
  });
}

void Fp8Weights::read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) {
  const MaybeFp8Tensor& tensor = entry(name);
  if (tensor.scales.empty()) return source_.read(name, dtype, wanted, out);
  CAPSTAN_ASSERT(fits(wanted, tensor.shape), "a region of " + std::string(name));
  if (!can_convert(DType::bf16, dtype))
    fail(ErrorCode::unsupported, description() + ": " + in_quotes(name) +
                                     " is dequantized and cannot be read as " + std::string(name_of(dtype)));
  std::vector<uint8_t> codes(static_cast<size_t>(wanted.sizes.elements()));
  source_.read(name, DType::f8e4m3, wanted, std::as_writable_bytes(std::span(codes)));
  const Region blocks = blocks_of(wanted);
  std::vector<float> scales(static_cast<size_t>(blocks.sizes.elements()));
  source_.read(tensor.scales, DType::f32, blocks, std::as_writable_bytes(std::span(scales)));
  std::vector<bf16> values(codes.size());
  const int64_t rows = wanted.sizes[0], columns = wanted.sizes[1];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t block_row = (wanted.offsets[0] + r) / kFp8Block - blocks.offsets[0];
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t block =
          block_row * blocks.sizes[1] + (wanted.offsets[1] + c) / kFp8Block - blocks.offsets[1];
      const auto i = static_cast<size_t>(r * columns + c);
      values[i] = bf16(decode<kE4m3>(codes[i]) * scales[static_cast<size_t>(block)]);
    }
  }
  copy_region(wanted, wanted, std::as_bytes(std::span(values)).data(), DType::bf16, wanted, out.data(),
              dtype);
}

}  // namespace capstan::formats
