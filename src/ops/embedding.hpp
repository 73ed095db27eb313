#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// y[N, h] = table[ids] (+ position_table[positions]). ids, positions i32 [N]. first_row: the global row of
// the table's first local row (a shard of the vocabulary); ids outside the shard give zero.
Var embedding(Tape& tape, const Tensor& ids, const Parameter& table,
              const Parameter* position_table = nullptr, const Tensor& positions = {}, int64_t first_row = 0);

}  // namespace capstan::ops
