// The gradients of gamma and beta of norms, which backward kernels compute beside the gradient of the input.
#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// Zeros for the gradient of a trainable parameter (kernels add to it); otherwise undefined.
Tensor partial_for(Device& device, const ParamStore& store, const Parameter* parameter, int64_t cols);
// Schedules the addition to the gradient of the parameter in the buffer. No effect for a null parameter.
void accumulate_parameter_gradient(BackwardContext& ctx, const Parameter* parameter, const Tensor& partial);

}  // namespace capstan::ops
