// The SIMD functions of kernels/cpu/simd-inl.hpp against double, for every instruction set that this machine
// runs.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/common/dropout.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/functions.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

void exp_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = hn::GetLane(exp(splat(x[i])));
}
void exp_not_positive_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = hn::GetLane(exp_not_positive(splat(x[i])));
}
void tanh_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = hn::GetLane(tanh(splat(x[i])));
}
void normal_all(const float* x, float* cumulative, float* density, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    VF c, d;
    normal_distribution(splat(x[i]), c, d);
    cumulative[i] = hn::GetLane(c);
    density[i] = hn::GetLane(d);
  }
}
int64_t philox_all(PhiloxKey key, uint64_t lo, uint64_t hi, uint32_t* words) {
  philox_words(key, lo, hi, words);
  return 4 * kStep;
}
template <class T>
void round_each(const float* x, T* y, float* back, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    store_part(splat(x[i]), y + i, 1);
    back[i] = hn::GetLane(load_part(y + i, 1));
  }
}
void round_all(const float* x, bf16* y, float* back, int64_t n) {
  round_each(x, y, back, n);
}
void round_half_all(const float* x, f16* y, float* back, int64_t n) {
  round_each(x, y, back, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace capstan::kernels {
HWY_EXPORT(exp_all);
HWY_EXPORT(exp_not_positive_all);
HWY_EXPORT(tanh_all);
HWY_EXPORT(normal_all);
HWY_EXPORT(philox_all);
HWY_EXPORT(round_all);
HWY_EXPORT(round_half_all);

namespace {
// Runs the body once for each instruction set of this machine among the compiled ones.
template <class Body>
void for_targets(Body&& body) {
  hwy::SetSupportedTargetsForTest(0);
  for (int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    INFO("instruction set ", hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// The largest distance of y from exp(x), in units of fp32's last place there.
double worst_units_of_exp(const std::vector<float>& x, const std::vector<float>& y) {
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const float unit = std::nextafter(static_cast<float>(exact), INFINITY) - static_cast<float>(exact);
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - exact) / static_cast<double>(unit));
  }
  return worst;
}
}  // namespace

TEST_CASE("exp is within 2 units in the last place") {
  std::vector<float> x, y;
  for (double v = -87.3; v < 88.3; v += 0.00171) x.push_back(static_cast<float>(v));
  y.resize(x.size());
  for_targets([&] {
    HWY_DYNAMIC_DISPATCH(exp_all)(x.data(), y.data(), static_cast<int64_t>(x.size()));
    CHECK(worst_units_of_exp(x, y) < 2);
    const float special[5] = {-INFINITY, -1000, 0, 1000, NAN};
    float out[5];
    HWY_DYNAMIC_DISPATCH(exp_all)(special, out, 5);
    CHECK(out[0] == 0);
    CHECK(out[1] == 0);
    CHECK(out[2] == 1);
    CHECK(out[3] > 2e38f);
    CHECK(std::isnan(out[4]));
  });
}

TEST_CASE("the exp of softmax is within 2 units in the last place, and exactly 0 for what is masked") {
  std::vector<float> x, y;
  for (double v = -87.3; v <= 0; v += 0.00171) x.push_back(static_cast<float>(v));
  y.resize(x.size());
  for_targets([&] {
    HWY_DYNAMIC_DISPATCH(exp_not_positive_all)(x.data(), y.data(), static_cast<int64_t>(x.size()));
    CHECK(worst_units_of_exp(x, y) < 2);
    const float special[5] = {-INFINITY, -1000, -88, 0, NAN};
    float out[5];
    HWY_DYNAMIC_DISPATCH(exp_not_positive_all)(special, out, 5);
    CHECK(out[0] == 0);
    CHECK(out[1] == 0);
    CHECK(out[2] == 0);
    CHECK(out[3] == 1);
    CHECK(std::isnan(out[4]));
  });
}

TEST_CASE("tanh is within 2 units in the last place, near 0 too") {
  std::vector<float> x, y;
  for (double v = -12; v < 12; v += 0.00117) x.push_back(static_cast<float>(v));
  for (double v = 1e-30; v < 1; v *= 1.3) x.push_back(static_cast<float>(-v));
  y.resize(x.size());
  for_targets([&] {
    HWY_DYNAMIC_DISPATCH(tanh_all)(x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::tanh(static_cast<double>(x[i]));
      const auto size = static_cast<float>(std::abs(exact));
      const double unit = static_cast<double>(std::nextafter(size, INFINITY)) - static_cast<double>(size);
      worst = std::max(worst, std::abs(static_cast<double>(y[i]) - exact) / unit);
    }
    CHECK(worst < 2);
    const float special[5] = {-INFINITY, -100, 0, 100, NAN};
    float out[5];
    HWY_DYNAMIC_DISPATCH(tanh_all)(special, out, 5);
    CHECK(out[0] == -1);
    CHECK(out[1] == -1);
    CHECK(out[2] == 0);
    CHECK(out[3] == 1);
    CHECK(std::isnan(out[4]));
  });
}

TEST_CASE("the normal distribution is right relative to itself down to its tail") {
  std::vector<float> x, c, d;
  for (double v = -12; v < 12; v += 0.0037) x.push_back(static_cast<float>(v));
  c.resize(x.size());
  d.resize(x.size());
  for_targets([&] {
    HWY_DYNAMIC_DISPATCH(normal_all)(x.data(), c.data(), d.data(), static_cast<int64_t>(x.size()));
    double worst_c = 0, worst_d = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double v = x[i];
      worst_c = std::max(worst_c, std::abs(c[i] / (0.5 * std::erfc(-v * std::sqrt(0.5))) - 1));
      worst_d = std::max(worst_d, std::abs(d[i] / (std::exp(-0.5 * v * v) / std::sqrt(2 * M_PI)) - 1));
    }
    CHECK(worst_c < 1e-5);  // the exponent's rounding grows with x²
    CHECK(worst_d < 1e-5);
  });
}

TEST_CASE("vector Philox gives the words of the scalar one") {
  const PhiloxKey key = philox_key(7, purpose::test, 9);
  for_targets([&] {
    for (uint64_t lo : {uint64_t{0}, uint64_t{12345678901234}})
      for (uint64_t hi : {uint64_t{0}, uint64_t{64}, uint64_t{11} << 40 | 12}) {
        uint32_t words[4 * 64];
        const int64_t n = HWY_DYNAMIC_DISPATCH(philox_all)(key, lo, hi, words);
        for (int64_t i = 0; i < n; ++i)
          CHECK(words[i] ==
                philox4x32(key, lo, hi + static_cast<uint64_t>(i) / 4)[static_cast<size_t>(i % 4)]);
      }
  });
}

TEST_CASE("vector bf16 rounds as the scalar type does") {
  std::vector<float> x{0.0f,      -0.0f, 1.00390625f, 1.01171875f, INFINITY,
                       -INFINITY, NAN,   3.4e38f,     1e-40f,      -1e-40f};
  uint32_t bits = 1;
  for (int i = 0; i < 5000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    float v;
    std::memcpy(&v, &bits, 4);
    x.push_back(v);
  }
  std::vector<bf16> y(x.size());
  std::vector<float> back(x.size());
  for_targets([&] {
    HWY_DYNAMIC_DISPATCH(round_all)(x.data(), y.data(), back.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      CHECK(y[i].bits == bf16(x[i]).bits);
      const auto expected = static_cast<float>(bf16(x[i]));
      CHECK(std::memcmp(&back[i], &expected, 4) == 0);
    }
  });
}

// The values of all codes, and what lies around the middle between each and the next.
TEST_CASE("vector fp16 rounds as the scalar type does, at every code") {
  std::vector<float> x;
  for (uint32_t code = 0; code < 65536; ++code) {
    f16 h;
    h.bits = static_cast<uint16_t>(code);
    const auto value = static_cast<float>(h);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    // Steps of fp16 among subnormal numbers are larger.
    for (const uint32_t other : {bits, bits + 0xFFF, bits + 0x1000, bits + 0x1001, bits + (1u << 21)}) {
      float v;
      std::memcpy(&v, &other, 4);
      x.push_back(v);
    }
  }
  std::vector<f16> y(x.size());
  std::vector<float> back(x.size());
  for_targets([&] {
    HWY_DYNAMIC_DISPATCH(round_half_all)(x.data(), y.data(), back.data(), static_cast<int64_t>(x.size()));
    int64_t wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const auto expected = static_cast<float>(f16(x[i]));
      wrong += y[i].bits != f16(x[i]).bits || std::memcmp(&back[i], &expected, 4) != 0;
    }
    CHECK(wrong == 0);
  });
}

}  // namespace capstan::kernels
#endif
