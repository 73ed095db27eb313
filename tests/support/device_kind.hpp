// train.device of a test's device.
#pragma once

#include "config/sections/train.hpp"
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

}  // namespace capstan::test
