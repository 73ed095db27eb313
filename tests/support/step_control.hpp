// The control of an optimizer update, as a step writes it.
#pragma once

#include "kernels/step_control.hpp"
#include "tensor/tensor.hpp"

namespace capstan::test {

inline Tensor step_control(Device& device, float gradient = 1, bool skip = false) {
  const kernels::StepControl control{.gradient = gradient, .skip = skip ? 1 : 0};
  return Tensor::from_host_bytes(device, {sizeof control}, DType::u8, std::as_bytes(std::span(&control, 1)));
}

}  // namespace capstan::test
