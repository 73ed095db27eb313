#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// y = factor * x, with the factor rounded to x's type. Move x in, so that the result overwrites it.
Var scale(Tape& tape, Var x, double factor);

}  // namespace capstan::ops
