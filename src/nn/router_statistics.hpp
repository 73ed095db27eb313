// Statistics of the routers of a step: the load of each expert, and the losses of the routers. Sums over
// micro-batches in device memory.
#pragma once

#include <map>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan::nn {

class RouterStatistics {
 public:
  // `layers`: the indices of all MoE layers of the model, in ascending order.
  RouterStatistics(Device& device, const std::vector<int64_t>& layers, int64_t experts);

  // Begins a step.
  void clear();
  // counts: fp32 [1, experts], how often the tokens of a micro-batch chose each expert. The losses are fp32
  // [1], undefined where there are none.
  void add(int64_t layer, const Tensor& counts, const Tensor& balance_loss, const Tensor& z_loss);

  // fp32 [layers, experts + 2]: the sums of the counts, of the load-balancing losses and of the z-losses. The
  // rows of layers of other ranks are 0.
  const Tensor& sums() const { return sums_; }

 private:
  int64_t experts_;
  std::map<int64_t, int64_t> rows_;
  Tensor sums_;
};

}  // namespace capstan::nn
