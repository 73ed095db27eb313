// Fields of a recipe for a test's device: train.device, and the precisions that it has.
#pragma once

#include "config/sections/mixed_precision.hpp"
#include "config/sections/train.hpp"
#include "support/devices.hpp"
#include "tensor/device.hpp"

namespace capstan::test {

constexpr config::DeviceKind device_kind(DeviceType type) {
  switch (type) {
    case DeviceType::cpu:
      return config::DeviceKind::cpu;
    case DeviceType::cuda:
      return config::DeviceKind::cuda;
    case DeviceType::checked:
      return config::DeviceKind::checked;
    case DeviceType::simulated:
      return config::DeviceKind::simulated;
    case DeviceType::meta:
      break;
  }
  return config::DeviceKind::meta;
}

// Whether D has the precision of the GEMMs of a recipe.
template <class D>
bool multiplies(const config::MixedPrecisionConfig& precision) {
  if (precision.fp4) return multiplies<D>("nvfp4");
  return !precision.fp8 || multiplies<D>(config::enum_name(precision.fp8_recipe));
}

}  // namespace capstan::test
