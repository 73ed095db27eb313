// Statistics of the routers of a step: the load of each expert, the choices that were dropped, and the losses
// of the routers. Sums over micro-batches in device memory.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "ops/tape.hpp"

namespace capstan::nn {

class RouterStatistics {
 public:
  // `layers`: the indices of all MoE layers of the model, in ascending order.
  // balance_losses: how many load-balancing losses each of them has.
  // global_batch: for layers that balance the load over the global batch.
  RouterStatistics(Device& device, const std::vector<int64_t>& layers, int64_t experts,
                   int64_t balance_losses, bool global_batch = false);

  // Begins a step.
  void clear();
  // counts: fp32 [1, experts], how often the tokens of a micro-batch chose each expert. The losses are fp32
  // [1]; balance has balance_losses of them or none, and z_loss may be undefined.
  void add(int64_t layer, const Tensor& counts, std::span<const Var> balance, const Var& z_loss);
  // fp32 [1]: the choices (of an expert by a token) that were dropped, beyond the capacity of experts. The
  // dispatcher of the layer's tokens adds to it.
  Tensor dropped(int64_t layer) const;
  // With global_batch: adds the counts of a micro-batch over all ranks to those of the step so far, fp32
  // [experts], which it returns. The next micro-batch changes them.
  const Tensor& add_to_batch(int64_t layer, const Tensor& counts);

  // fp32 [layers, experts + balance_losses + 2]: the sums of the counts, of each load-balancing loss, of the
  // z-losses, and of the dropped choices. The rows of layers of other ranks are 0.
  const Tensor& sums() const { return sums_; }

 private:
  int64_t experts_, balance_losses_;
  std::map<int64_t, int64_t> rows_;
  Tensor sums_;
  // The counts of the step so far, by row; empty without global_batch.
  std::vector<Tensor> batch_;
};

}  // namespace capstan::nn
