// Initial values of parameters, from their ParamSpec.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.hpp"
#include "ops/parameter.hpp"

namespace capstan::nn {

// Writes the initial values of a region of the parameter, row-major. Element i (row-major in the global
// tensor) depends on (seed, spec.name, i) alone: normal values are std * normal_at(philox_key(seed,
// purpose::init, random_sequence_of(name)), i), uniform values std * (2 u - 1) with the same generator's u in
// [0, 1).
void initialize(const ParamSpec& spec, uint64_t seed, const Region& region, std::span<float> values,
                ThreadPool& pool);

}  // namespace capstan::nn
