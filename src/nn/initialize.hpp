// First values of parameters, from their ParamSpec.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/thread_pool.hpp"
#include "ops/parameter.hpp"

namespace capstan::nn {

// A part of a parameter seen as a matrix: rows are the first dimension, columns all others together (1 for a
// vector).
struct InitRegion {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
  static InitRegion full(const Shape& shape);
};

// The stream of random numbers that belongs to a name: the same on every rank and in every version.
uint64_t random_stream_of(std::string_view name);

// Writes the part's values, row-major, [part.rows * part.columns]. Element i (row-major in the global tensor)
// depends on (seed, spec.name, i) alone: normal values are std * normal_at(philox_key(seed, purpose::init,
// random_stream_of(name)), i), uniform ones std * (2 u - 1) of the same generator's u in [0, 1).
void initialize(const ParamSpec& spec, uint64_t seed, const InitRegion& part, std::span<float> values,
                ThreadPool& pool);

}  // namespace capstan::nn
