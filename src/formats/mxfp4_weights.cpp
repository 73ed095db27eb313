#include "formats/mxfp4_weights.hpp"

#include <cmath>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::formats {

using checkpoint::TensorInfo;

namespace {

constexpr std::string_view kCodesOf = "_blocks", kExponentsOf = "_scales";

std::string described(const std::string& name, const TensorInfo& info) {
  return in_quotes(name) + " is " + info.shape.text() + " in " + std::string(name_of(info.dtype));
}

// The tensor that codes and exponents describe. Throws ErrorCode::format if they do not fit.
MaybeMxfp4Tensor quantized_tensor(checkpoint::TensorSource& source, const std::string& blocks,
                                  const std::string& scales) {
  const TensorInfo &codes = source.at(blocks), &exponents = source.at(scales);
  const Shape& s = codes.shape;
  const bool fits = codes.dtype == DType::u8 && exponents.dtype == DType::u8 && s.size() == 4 &&
                    s[3] == kMxfp4Block / 2 && exponents.shape == Shape{s[0], s[1], s[2]};
  if (!fits)
    fail(ErrorCode::format,
         source.description() + ": " + described(blocks, codes) + ", and " + described(scales, exponents) +
             "; MXFP4 has codes u8 [experts, out, blocks, 16] and a scale u8 for each block");
  return {{DType::bf16, {s[0], checked_mul(s[2], kMxfp4Block), s[1]}}, blocks, scales};
}

// E2M1: a sign, two bits of the exponent, one of the fraction.
float value_of_code(uint32_t code) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float value = kValues[code & 7];
  return (code & 8) != 0 ? -value : value;
}

}  // namespace

Mxfp4Weights::Mxfp4Weights(checkpoint::TensorSource& source) : source_(source) {
  for (const std::string& name : source.names()) {
    const auto stem_if = [&](std::string_view suffix, std::string_view other) -> std::string {
      if (!name.ends_with(suffix)) return {};
      std::string stem = name.substr(0, name.size() - suffix.size());
      return source.find(stem + std::string(other)) ? stem : std::string();
    };
    if (const std::string stem = stem_if(kCodesOf, kExponentsOf); !stem.empty())
      tensors_.emplace(stem, quantized_tensor(source, name, stem + std::string(kExponentsOf)));
    else if (stem_if(kExponentsOf, kCodesOf).empty())
      tensors_.emplace(name, MaybeMxfp4Tensor{source.at(name), {}, {}});
  }
}

void Mxfp4Weights::read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) {
  const MaybeMxfp4Tensor& tensor = entry(name);
  if (tensor.blocks.empty()) return source_.read(name, dtype, wanted, out);
  CAPSTAN_ASSERT(fits(wanted, tensor.shape), "a region of " + std::string(name));
  if (!can_convert(DType::bf16, dtype))
    fail(ErrorCode::unsupported, description() + ": " + in_quotes(name) +
                                     " is dequantized and cannot be read as " + std::string(name_of(dtype)));
  const int64_t experts = wanted.sizes[0], rows = wanted.sizes[1], columns = wanted.sizes[2],
                first = wanted.offsets[1] / kMxfp4Block,
                blocks = ceil_div(wanted.offsets[1] + rows, kMxfp4Block) - first;
  std::vector<uint8_t> codes(static_cast<size_t>(columns * blocks * kMxfp4Block / 2)),
      scales(static_cast<size_t>(columns * blocks));
  std::vector<float> factors(scales.size());
  std::vector<bf16> values(static_cast<size_t>(wanted.sizes.elements()));
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t expert = wanted.offsets[0] + e, column = wanted.offsets[2];
    source_.read(tensor.blocks, DType::u8,
                 {{expert, column, first, 0}, {1, columns, blocks, kMxfp4Block / 2}},
                 std::as_writable_bytes(std::span(codes)));
    source_.read(tensor.scales, DType::u8, {{expert, column, first}, {1, columns, blocks}},
                 std::as_writable_bytes(std::span(scales)));
    for (size_t i = 0; i < scales.size(); ++i) factors[i] = std::ldexp(1.0f, scales[i] - 127);
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t in = wanted.offsets[1] + r - first * kMxfp4Block, code = c * blocks * kMxfp4Block + in;
        const uint32_t pair = codes[static_cast<size_t>(code / 2)],
                       bits = code % 2 == 0 ? pair & 15 : pair >> 4;
        values[static_cast<size_t>((e * rows + r) * columns + c)] =
            bf16(value_of_code(bits) * factors[static_cast<size_t>(c * blocks + in / kMxfp4Block)]);
      }
  }
  copy_region(wanted, wanted, std::as_bytes(std::span(values)).data(), DType::bf16, wanted, out.data(),
              dtype);
}

}  // namespace capstan::formats
