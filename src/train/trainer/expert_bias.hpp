// Balancing without a loss: after each step, the biases with which routers choose experts move toward an
// equal load (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy").
#pragma once

#include <vector>

#include "config/sections/config.hpp"
#include "models/model.hpp"
#include "parallel/flat_store.hpp"

namespace capstan::train {

class ExpertBiases {
 public:
  // The biases of this rank's layers: none without model.moe_router_enable_expert_bias, and none with
  // adapters, because they belong to the frozen model. Model and store outlive the object.
  ExpertBiases(const config::Config& config, const models::Model& model, parallel::FlatStore& store);

  // Adds model.moe_router_bias_update_rate to the bias of each expert whose load is below the mean, and
  // subtracts it where the load is above, on the device. router_sums: nn::RouterStatistics::sums() over the
  // micro-batches and ranks of the global batch, the same on all ranks, which thus keep the same biases.
  // control: the kernels::StepControl of the step, in bytes, which may skip the update.
  void update(const Tensor& router_sums, const Tensor& control);

 private:
  struct LayerBias {
    const Parameter* bias;
    // Its row of the router's sums.
    int64_t row;
  };
  parallel::FlatStore& store_;
  std::vector<LayerBias> layers_;
  // Rows of the router's sums, those of other ranks' layers too.
  int64_t rows_ = 0;
  int64_t experts_ = 0;
  float rate_ = 0;
};

}  // namespace capstan::train
