// The ranks among which the layers of a model are cut, as layers see them.
#pragma once

#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

struct Parallel {
  ops::TensorParallel tensor;
};

}  // namespace capstan::nn
