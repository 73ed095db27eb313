#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// x in another element type (fp32, bf16, fp16); the gradient is cast back.
Var cast(Tape& tape, const Var& x, DType type);

// Casts without recording; returns x itself where it already has the type.
Tensor converted(const Tensor& x, DType type);

}  // namespace capstan::ops
