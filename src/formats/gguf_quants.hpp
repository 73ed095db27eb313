// Element types of GGUF files: blocks of quantized values to fp32, and those that are written from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace capstan::formats {

struct GgmlType {
  uint32_t id;
  std::string_view name;
  // Number of values in one block.
  int64_t block;
  // Size of one block in bytes.
  int64_t bytes;
  void (*read)(const std::byte* block, float* values);
};
// Returns nullptr for an unsupported type.
const GgmlType* find_ggml_type(uint32_t id);
// The name of a type, including unsupported ones; empty if unknown.
std::string_view ggml_type_name(uint32_t id);

inline constexpr uint32_t kGgmlF32 = 0, kGgmlF16 = 1, kGgmlQ4_0 = 2, kGgmlQ4_1 = 3, kGgmlQ8_0 = 8,
                          kGgmlQ4_K = 12, kGgmlQ6_K = 14, kGgmlBf16 = 30, kGgmlMxfp4 = 39;

// `blocks` holds out.size() / type.block blocks.
void dequantize(const GgmlType& type, std::span<const std::byte> blocks, std::span<float> out);
// Resizes `out` and fills it with the values as F32, F16, BF16 or Q8_0. values.size() must be a multiple of
// type.block. Throws ErrorCode::unsupported for values that the type cannot represent: finite values above
// F16's largest; in Q8_0 also NaN and infinities.
void quantize(const GgmlType& type, std::span<const float> values, std::vector<std::byte>& out);

}  // namespace capstan::formats
