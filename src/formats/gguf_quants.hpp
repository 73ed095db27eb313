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
  int64_t block;  // values of one block
  int64_t bytes;  // of one block
  void (*read)(const std::byte* block, float* values);
};
const GgmlType* find_ggml_type(uint32_t id);  // nullptr: one that is not read
// Also of types that are not read; empty: unknown.
std::string_view ggml_type_name(uint32_t id);

inline constexpr uint32_t kGgmlF32 = 0, kGgmlF16 = 1, kGgmlQ4_0 = 2, kGgmlQ4_1 = 3, kGgmlQ8_0 = 8,
                          kGgmlQ4_K = 12, kGgmlQ6_K = 14, kGgmlBf16 = 30;

// `blocks` holds out.size() / type.block blocks.
void dequantize(const GgmlType& type, std::span<const std::byte> blocks, std::span<float> out);
// F32, F16, BF16 and Q8_0 alone; values.size() is a multiple of type.block. Appends nothing: resizes `out`.
// ErrorCode::unsupported for values that the type cannot represent: finite values above F16's largest; in
// Q8_0 also NaN and infinities.
void quantize(const GgmlType& type, std::span<const float> values, std::vector<std::byte>& out);

}  // namespace capstan::formats
