// First values of parameters, from their ParamSpec.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.hpp"
#include "ops/parameter.hpp"

namespace capstan::nn {

// A part of a parameter seen as a matrix: rows are the first dimension, columns all others together (1 for a
// vector).
struct Rectangle {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
  static Rectangle whole(const Shape& shape);
};

// Writes the part's values, row-major, [part.rows * part.columns]. Element i (row-major in the global tensor)
// depends on (seed, spec.name, i) alone: normal values are std * normal_at(philox_key(seed, purpose::init,
// hash of the name), i), uniform ones std * (2 u - 1) of the same generator's u in [0, 1).
void initialise(const ParamSpec& spec, uint64_t seed, const Rectangle& part, std::span<float> values,
                ThreadPool& pool);

}  // namespace capstan::nn
