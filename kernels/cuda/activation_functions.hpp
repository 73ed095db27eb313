// The activation functions of kernels. Each gives its value and its derivative.
#pragma once

#include "kernels/activation.hpp"
#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

struct ActivationValue {
  float value, derivative;
};

struct Gelu {
  static __device__ ActivationValue of(float x) {
    // erfc keeps the lower tail right relative to itself.
    const float cumulative = 0.5f * std::erfc(-0.70710678118654752f * x);
    const float density = 0.3989422804014327f * std::exp(-0.5f * x * x);
    return {x * cumulative, x * density + cumulative};
  }
};
// (1 + tanh u) / 2 = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³).
struct GeluTanh {
  static __device__ ActivationValue of(float x) {
    constexpr float kTwoC = 2 * 0.7978845608028654f, kCubic = 0.044715f;
    const float s = reciprocal_fast(1.0f + std::exp(-kTwoC * x * (1.0f + kCubic * x * x))), y = x * s;
    const float inner = kTwoC * (1.0f + 3 * kCubic * x * x);
    // Beyond the range in which 1 - s is not 0, `inner` may be infinite.
    const float rest = s < 1.0f && s > 0.0f ? y * (1.0f - s) * inner : x != x ? x : 0.0f;
    return {y, s + rest};
  }
};
struct Silu {
  static __device__ ActivationValue of(float x) {
    const float s = reciprocal_fast(1.0f + std::exp(-x)), y = x * s;
    return {y, s + y * (1.0f - s)};
  }
};
// x < 0 ? 0 : x keeps NaN.
struct Relu {
  static __device__ ActivationValue of(float x) { return {x < 0 ? 0.0f : x, x > 0 ? 1.0f : 0.0f}; }
};
struct SquaredRelu {
  static __device__ ActivationValue of(float x) {
    const float r = x < 0 ? 0.0f : x;
    return {r * r, r + r};
  }
};

// body(F{}) with the function of `kind`.
template <class Body>
void by_kind(ActivationKind kind, const Body& body) {
  switch (kind) {
    case ActivationKind::gelu:
      return body(Gelu{});
    case ActivationKind::gelu_tanh:
      return body(GeluTanh{});
    case ActivationKind::silu:
      return body(Silu{});
    case ActivationKind::relu:
      return body(Relu{});
    case ActivationKind::squared_relu:
      return body(SquaredRelu{});
  }
}

}  // namespace capstan::kernels::CAPSTAN_GPU
