// The conversions of CUDA's headers, which state what the instructions do, against those of
// tensor/float8.hpp, whose bits kernels/cuda/intrinsics.hpp promises.
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#if CUDART_VERSION >= 12080
#include <cuda_fp4.h>
#endif

#include <bit>
#include <cmath>

#include "tensor/float8.hpp"

using namespace capstan;

TEST_CASE("CUDA's conversions to fp8 and fp4 have the same codes, but for the sign of NaN") {
  // Every upper half of an fp32, which decides with lower halves on both sides of ties and on them.
  for (uint32_t upper = 0; upper < 65536; ++upper)
    for (const uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const uint32_t bits = upper << 16 | lower, sign = bits >> 31;
      const auto value = std::bit_cast<float>(bits);
      const uint32_t e4m3 = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3),
                     e5m2 = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
      REQUIRE((e4m3 | sign << 7) == encode<kE4m3>(value));
      REQUIRE((e5m2 | sign << 7) == encode<kE5m2>(value));
#if CUDART_VERSION >= 12080
      const uint32_t e2m1 = __nv_cvt_float_to_fp4(value, __NV_E2M1, cudaRoundNearest);
      REQUIRE((e2m1 | sign << 3) == encode<kE2m1>(value));
#endif
    }
}

TEST_CASE("CUDA's conversions from fp8 to fp16 have the same values") {
  const auto check = [](uint32_t code, __nv_fp8_interpretation_t format, float value) {
    f16 converted;
    converted.bits = __nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(code), format).x;
    const auto got = static_cast<float>(converted);
    CHECK((std::isnan(value) ? std::isnan(got) : got == value && std::signbit(got) == std::signbit(value)));
  };
  for (uint32_t code = 0; code < 256; ++code) {
    check(code, __NV_E4M3, decode<kE4m3>(code));
    check(code, __NV_E5M2, decode<kE5m2>(code));
  }
}
