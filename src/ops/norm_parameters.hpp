// The gradients of gamma and beta of norms, which backward kernels compute beside the gradient of the input.
#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// Zeros for the gradient of a parameter that trains (kernels add to it); otherwise undefined.
Tensor partial_for(Device& device, const ParamStore& store, const Parameter* parameter, int64_t cols);
// The W step adds it to the gradient buffer. Nothing for a null parameter.
void hand_over(BackwardStep& step, const Parameter* parameter, const Tensor& partial);

}  // namespace capstan::ops
