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
struct Rectangle {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
  static Rectangle whole(const Shape& shape);
};

// The stream of random numbers that belongs to a name: the same on every rank and in every version.
uint64_t stream_of(std::string_view name);

// Writes the part's values, row-major, [part.rows * part.columns]. Element i (row-major in the global tensor)
// depends on (seed, spec.name, i) alone: normal values are std * normal_at(philox_key(seed, purpose::init,
// stream_of(name)), i), uniform ones std * (2 u - 1) of the same generator's u in [0, 1).
void initialise(const ParamSpec& spec, uint64_t seed, const Rectangle& part, std::span<float> values,
                ThreadPool& pool);

}  // namespace capstan::nn
