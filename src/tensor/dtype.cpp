#include "tensor/dtype.hpp"

#include <array>

namespace capstan {

namespace {
struct Row {
  DType type;
  int64_t size;
  std::string_view name, alias, safetensors;
};
constexpr std::array<Row, 14> kTypes{{{DType::f32, 4, "fp32", "float32", "F32"},
                                      {DType::bf16, 2, "bf16", "bfloat16", "BF16"},
                                      {DType::f16, 2, "fp16", "float16", "F16"},
                                      {DType::f64, 8, "fp64", "float64", "F64"},
                                      {DType::u8, 1, "u8", "uint8", "U8"},
                                      {DType::i8, 1, "i8", "int8", "I8"},
                                      {DType::u16, 2, "u16", "uint16", "U16"},
                                      {DType::i16, 2, "i16", "int16", "I16"},
                                      {DType::i32, 4, "i32", "int32", "I32"},
                                      {DType::i64, 8, "i64", "int64", "I64"},
                                      {DType::f8e4m3, 1, "fp8 e4m3", {}, {}},
                                      {DType::f8e5m2, 1, "fp8 e5m2", {}, {}},
                                      {DType::f8e8m0, 1, "fp8 e8m0", {}, {}},
                                      {DType::f4e2m1x2, 1, "fp4 e2m1", {}, {}}}};
}  // namespace

int64_t size_of(DType type) {
  return kTypes[static_cast<size_t>(type)].size;
}
std::string_view name_of(DType type) {
  return kTypes[static_cast<size_t>(type)].name;
}
std::optional<DType> dtype_from_name(std::string_view name) {
  for (const auto& row : kTypes)
    if (!row.safetensors.empty() && (name == row.name || name == row.alias || name == row.safetensors))
      return row.type;
  return std::nullopt;
}

}  // namespace capstan
