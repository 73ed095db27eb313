#include "tensor/float8.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/support/fixture_file.hpp"

using namespace capstan;

namespace {

const test::FixtureFile& fixture() {
  static const test::FixtureFile file("tests/tensor/float8.safetensors");
  return file;
}

template <SmallFloat F>
void check_format(const std::string& name) {
  const auto values = fixture().values<float>(name + ".values");
  for (uint32_t code = 0; code < values.size(); ++code) {
    INFO(name, " code ", code);
    const float value = decode<F>(code);
    CHECK((std::isnan(values[code]) ? std::isnan(value) : value == values[code]));
    CHECK(std::signbit(value) == std::signbit(values[code]));
    if (std::isfinite(value)) CHECK(encode<F>(value) == code);
  }
  const auto inputs = fixture().values<float>(name + ".inputs");
  const auto codes = fixture().values<uint8_t>(name + ".codes");
  REQUIRE(inputs.size() == codes.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    INFO(name, " of ", inputs[i]);
    const uint32_t code = encode<F>(inputs[i]);
    if (std::isnan(inputs[i]) && F.nan_code > F.largest_code)
      CHECK(std::isnan(decode<F>(code)));
    else if (!std::isnan(inputs[i]))
      CHECK(code == codes[i]);
  }
  CHECK(F.largest() == decode<F>(F.largest_code));
}

}  // namespace

TEST_CASE("e4m3, e5m2 and e2m1 convert as ml_dtypes and torch do") {
  check_format<kE4m3>("e4m3");
  check_format<kE5m2>("e5m2");
  check_format<kE2m1>("e2m1");
}

TEST_CASE("fp32 numbers lie nearest to their code, ties to even") {
  // Every 509th fp32 from 2^-9 to 2^-5: subnormal and normal e4m3.
  const auto begin = std::bit_cast<uint32_t>(0x1p-9f), end = std::bit_cast<uint32_t>(0x1p-5f);
  for (uint32_t bits = begin; bits < end; bits += 509) {
    const float value = std::bit_cast<float>(bits);
    const uint32_t code = encode<kE4m3>(value);
    const double apart = std::abs(static_cast<double>(decode<kE4m3>(code)) - value);
    for (const uint32_t other : {code - 1, code + 1}) {
      const double further = std::abs(static_cast<double>(decode<kE4m3>(other)) - value);
      CHECK((apart < further || (apart == further && code % 2 == 0)));
    }
  }
}

TEST_CASE("e8m0 rounds up to a power of two") {
  for (const int exponent : {-126, -60, -1, 0, 1, 77, 126}) {
    const float power = std::ldexp(1.0f, exponent);
    const auto code = static_cast<uint32_t>(exponent + 127);
    CHECK(decode_e8m0(code) == power);
    CHECK(encode_e8m0_up(power) == code);
    CHECK(encode_e8m0_up(std::nextafter(power, INFINITY)) == code + 1);
    CHECK(encode_e8m0_up(1.9f * power) == code + 1);
  }
  CHECK(encode_e8m0_up(0) == 0);
  CHECK(encode_e8m0_up(0x1p-127f) == 0);
  CHECK(encode_e8m0_up(0x1.8p-127f) == 1);
  CHECK(encode_e8m0_up(std::numeric_limits<float>::max()) == 254);
  CHECK(encode_e8m0_up(NAN) == 255);
  CHECK(std::isnan(decode_e8m0(255)));
}

TEST_CASE("no file holds floating-point types below 16 bits") {
  for (const DType type : {DType::f8e4m3, DType::f8e5m2, DType::f8e8m0, DType::f4e2m1x2}) {
    CHECK(size_of(type) == 1);
    CHECK(!dtype_from_name(name_of(type)));
  }
  CHECK(!dtype_from_name("F8_E4M3"));
  CHECK(!dtype_from_name(""));
}
