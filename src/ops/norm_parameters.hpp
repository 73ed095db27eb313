// gamma and beta of norms: their use by kernels, and their gradients, which backward kernels compute beside
// the gradient of the input.
#pragma once

#include <memory>
#include <vector>

#include "ops/tape.hpp"

namespace capstan::ops {

// The parameter for a kernel, held by `pins`; undefined for a null parameter.
Tensor pinned(ParamStore& store, const Parameter* parameter, std::vector<std::unique_ptr<ParamPin>>& pins);
// Zeros for the gradient of a parameter that trains (kernels add to it); otherwise undefined.
Tensor partial_for(Device& device, const ParamStore& store, const Parameter* parameter, int64_t cols);
// The W step adds it to the gradient buffer. Nothing for a null parameter.
void hand_over(BackwardStep& step, const Parameter* parameter, const Tensor& partial);

}  // namespace capstan::ops
