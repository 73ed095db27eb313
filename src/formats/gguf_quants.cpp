#include "formats/gguf_quants.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"
#include "tensor/dtype.hpp"

namespace capstan::formats {

namespace {

struct UnsupportedType {
  uint32_t id;
  std::string_view name;
};
constexpr std::array kOthers = {
    UnsupportedType{6, "Q5_0"},     UnsupportedType{7, "Q5_1"},     UnsupportedType{9, "Q8_1"},
    UnsupportedType{10, "Q2_K"},    UnsupportedType{11, "Q3_K"},    UnsupportedType{13, "Q5_K"},
    UnsupportedType{15, "Q8_K"},    UnsupportedType{16, "IQ2_XXS"}, UnsupportedType{17, "IQ2_XS"},
    UnsupportedType{18, "IQ3_XXS"}, UnsupportedType{19, "IQ1_S"},   UnsupportedType{20, "IQ4_NL"},
    UnsupportedType{21, "IQ3_S"},   UnsupportedType{22, "IQ2_S"},   UnsupportedType{23, "IQ4_XS"},
    UnsupportedType{24, "I8"},      UnsupportedType{25, "I16"},     UnsupportedType{26, "I32"},
    UnsupportedType{27, "I64"},     UnsupportedType{28, "F64"},     UnsupportedType{29, "IQ1_M"},
    UnsupportedType{34, "TQ1_0"},   UnsupportedType{35, "TQ2_0"},
};

template <class T>
T at(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}
float half_at(const std::byte* bytes) {
  return static_cast<float>(at<f16>(bytes));
}
int low(std::byte b) {
  return std::to_integer<int>(b) & 15;
}
int high(std::byte b) {
  return std::to_integer<int>(b) >> 4;
}

// Elements i and i + 16 share a byte.
void q4_0(const std::byte* b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(low(b[2 + i]) - 8) * d;
    y[i + 16] = static_cast<float>(high(b[2 + i]) - 8) * d;
  }
}
void q4_1(const std::byte* b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(low(b[4 + i])) * d + m;
    y[i + 16] = static_cast<float>(high(b[4 + i])) * d + m;
  }
}
void q8_0(const std::byte* b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(at<int8_t>(b + 2 + i)) * d;
}

// One E8M0 exponent, and E2M1 codes, of which i and i + 16 share a byte. As in the reference, the scale is
// halved and the codes are doubled.
void mxfp4(const std::byte* b, float* y) {
  constexpr float kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
  const float half = std::ldexp(1.0f, std::to_integer<int>(b[0]) - 128);
  for (int i = 0; i < 16; ++i) {
    y[i] = kTwice[low(b[1 + i])] * half;
    y[i + 16] = kTwice[high(b[1 + i])] * half;
  }
}

// Eight scales and eight minima of six bits in twelve bytes.
void q4_k(const std::byte* b, float* y) {
  const float d = half_at(b), least = half_at(b + 2);
  const std::byte* packed = b + 4;
  const auto byte = [&](int i) { return std::to_integer<int>(packed[i]); };
  for (int j = 0; j < 8; ++j) {
    const int scale = j < 4 ? byte(j) & 63 : (byte(j + 4) & 15) | ((byte(j - 4) >> 6) << 4);
    const int minimum = j < 4 ? byte(j + 4) & 63 : (byte(j + 4) >> 4) | ((byte(j) >> 6) << 4);
    const float step = d * static_cast<float>(scale), offset = least * static_cast<float>(minimum);
    const std::byte* values = b + 16 + j / 2 * 32;
    for (int i = 0; i < 32; ++i)
      y[j * 32 + i] = step * static_cast<float>(j % 2 == 0 ? low(values[i]) : high(values[i])) - offset;
  }
}

// Four bits in ql, two in qh, sixteen scales of a byte.
void q6_k(const std::byte* b, float* y) {
  const float d = half_at(b + 208);
  for (int half = 0; half < 2; ++half) {
    const std::byte *ql = b + 64 * half, *qh = b + 128 + 32 * half, *scales = b + 192 + 8 * half;
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 32; ++i) {
        const std::byte packed = ql[32 * (part % 2) + i];
        const int bits = (std::to_integer<int>(qh[i]) >> (2 * part)) & 3;
        const int value = ((part < 2 ? low(packed) : high(packed)) | (bits << 4)) - 32;
        const float step = d * static_cast<float>(at<int8_t>(scales + 2 * part + i / 16));
        y[128 * half + 32 * part + i] = step * static_cast<float>(value);
      }
  }
}

constexpr std::array kTypes = {
    GgmlType{kGgmlF32, "F32", 1, 4, [](const std::byte* b, float* y) { *y = at<float>(b); }},
    GgmlType{kGgmlF16, "F16", 1, 2, [](const std::byte* b, float* y) { *y = half_at(b); }},
    GgmlType{kGgmlQ4_0, "Q4_0", 32, 18, q4_0},
    GgmlType{kGgmlQ4_1, "Q4_1", 32, 20, q4_1},
    GgmlType{kGgmlQ8_0, "Q8_0", 32, 34, q8_0},
    GgmlType{kGgmlQ4_K, "Q4_K", 256, 144, q4_k},
    GgmlType{kGgmlQ6_K, "Q6_K", 256, 210, q6_k},
    GgmlType{kGgmlBf16, "BF16", 1, 2,
             [](const std::byte* b, float* y) { *y = static_cast<float>(at<bf16>(b)); }},
    GgmlType{kGgmlMxfp4, "MXFP4", 32, 17, mxfp4},
};

}  // namespace

const GgmlType* find_ggml_type(uint32_t id) {
  for (const GgmlType& type : kTypes)
    if (type.id == id) return &type;
  return nullptr;
}

std::string_view ggml_type_name(uint32_t id) {
  if (const GgmlType* type = find_ggml_type(id)) return type->name;
  for (const UnsupportedType& other : kOthers)
    if (other.id == id) return other.name;
  return "";
}

void dequantize(const GgmlType& type, std::span<const std::byte> blocks, std::span<float> out) {
  const size_t count = out.size() / static_cast<size_t>(type.block);
  CAPSTAN_ASSERT(out.size() % static_cast<size_t>(type.block) == 0 &&
                     blocks.size() == count * static_cast<size_t>(type.bytes),
                 "complete blocks");
  for (size_t i = 0; i < count; ++i)
    type.read(blocks.data() + i * static_cast<size_t>(type.bytes),
              out.data() + i * static_cast<size_t>(type.block));
}

namespace {

[[noreturn]] void cannot_hold(const GgmlType& type, float value) {
  fail(ErrorCode::unsupported, std::string(type.name) + " cannot hold the value " + to_text(value),
       std::isfinite(value) ? "{gguf_types}" : "the weights are not numbers: did the run diverge?");
}

// Converts to fp16; refuses finite values that would become infinite.
f16 half_of(const GgmlType& type, float value, float of) {
  const f16 half(value);
  if (!std::isfinite(static_cast<float>(half)) && std::isfinite(value)) cannot_hold(type, of);
  return half;
}

}  // namespace

void quantize(const GgmlType& type, std::span<const float> values, std::vector<std::byte>& out) {
  const size_t count = values.size() / static_cast<size_t>(type.block);
  CAPSTAN_ASSERT(values.size() % static_cast<size_t>(type.block) == 0, "complete blocks");
  out.resize(count * static_cast<size_t>(type.bytes));
  for (size_t i = 0; i < count; ++i) {
    const float* x = values.data() + i * static_cast<size_t>(type.block);
    std::byte* b = out.data() + i * static_cast<size_t>(type.bytes);
    if (type.id == kGgmlF32) {
      std::memcpy(b, x, sizeof(float));
    } else if (type.id == kGgmlF16) {
      const f16 half = half_of(type, *x, *x);
      std::memcpy(b, &half, sizeof half);
    } else if (type.id == kGgmlBf16) {
      const bf16 brain(*x);
      std::memcpy(b, &brain, sizeof brain);
    } else {
      CAPSTAN_ASSERT(type.id == kGgmlQ8_0, "a type that is written");
      float largest = 0;
      for (int k = 0; k < 32; ++k) {
        if (!std::isfinite(x[k])) cannot_hold(type, x[k]);
        largest = std::max(largest, std::abs(x[k]));
      }
      const float d = largest / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
      const f16 half = half_of(type, d, largest);
      std::memcpy(b, &half, sizeof half);
      for (int k = 0; k < 32; ++k)
        b[2 + k] = static_cast<std::byte>(
            static_cast<int8_t>(std::isfinite(inverse) ? std::round(x[k] * inverse) : 0));
    }
  }
}

}  // namespace capstan::formats
