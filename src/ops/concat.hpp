#pragma once

#include <span>
#include <vector>

#include "ops/tape.hpp"

namespace capstan::ops {

// [N, A + B]: the columns of a[N, A], then those of b[N, B]. Both have one type.
Var concat_columns(Tape& tape, const Var& a, const Var& b);

// [K N, A]: the rows of the K parts [N, A], which have one shape and type, one part after the other.
Var concat_rows(Tape& tape, std::span<const Var> parts);

// The reverse: x[K N, A] as K parts [N, A], which are views of x.
std::vector<Var> split_rows(Tape& tape, const Var& x, int64_t count);

}  // namespace capstan::ops
