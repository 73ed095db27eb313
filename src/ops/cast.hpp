#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// x in another element type (fp32, bf16); the gradient is cast back.
Var cast(Tape& tape, const Var& x, DType type);

// The same outside of the tape; the tensor itself where it is of that type.
Tensor converted(const Tensor& x, DType type);

}  // namespace capstan::ops
