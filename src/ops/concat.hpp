#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// [N, A + B]: the columns of a[N, A], then those of b[N, B]. Both have one type.
Var concat_columns(Tape& tape, const Var& a, const Var& b);

}  // namespace capstan::ops
