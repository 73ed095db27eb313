#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// y = factor * x, with the factor rounded to x's type. Move x in: its memory then takes the result.
Var scale(Tape& tape, Var x, double factor);

}  // namespace capstan::ops
