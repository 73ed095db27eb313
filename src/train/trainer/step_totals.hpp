// The numbers of a training step in device memory: sums over micro-batches and ranks, and the decision about
// the update that follows from them. The host reads them once, at the end of the step.
#pragma once

#include <functional>
#include <vector>

#include "comm/mesh.hpp"
#include "kernels/step_control.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/trainer/micro_batch_runner.hpp"

namespace capstan::train {

// Every rank of the mesh calls the same methods in the same order; all but control(), read() and those of the
// fingerprint are collective.
class StepTotals {
 public:
  // All arguments but the optimizer outlive the object. router_values: elements of Losses::routers.
  // mtp_depths: depths of multi-token prediction of the model, which other stages may hold.
  StepTotals(const comm::Mesh& mesh, Device& device, parallel::FlatStore& store,
             const optim::Optimizer& optimizer, int64_t router_values = 0, int64_t mtp_depths = 0);

  // The fingerprint of a step: a hash of this rank's gradients and losses before they are reduced.
  // clear_fingerprint() begins a step; add_to_fingerprint() adds a contiguous tensor, on the compute queue.
  // The same calls with the same bits give the same fingerprint.
  void clear_fingerprint();
  void add_to_fingerprint(const Tensor& tensor);
  // Sums the losses and their weights, and the statistics of the routers, over all ranks. Only the last
  // pipeline stage has losses.
  void sum_losses(const MicroBatchRunner::Losses& losses);
  // Sums the squares of the gradients; with count_zeros also counts the gradients that are zero.
  void sum_gradients(bool count_zeros);
  // Computes mean loss, gradient norm and control().
  void decide(const kernels::StepLimits& limits);
  // Sums the squares of the main parameters.
  void sum_parameters();

  // kernels::StepControl in bytes, for the optimizer.
  const Tensor& control() const { return control_; }
  // The statistics of the routers, fp32 [router_values], on the device; over all ranks after sum_losses().
  const Tensor& router_sums() const { return routers_; }
  // Waits for the compute queue.
  kernels::StepValues read();
  // The statistics of the routers (nn::RouterStatistics::sums(), over all ranks) as of the last read().
  const std::vector<float>& router_values() const { return router_values_; }
  // The sum of Losses::mtp_sums of each depth, over all ranks, as of the last read().
  const std::vector<double>& mtp_sums() const { return mtp_values_; }

 private:
  Tensor field(size_t offset, int64_t count, DType dtype) const;
  // total = the sum over all ranks and both grids; `sum` writes this rank's part of a grid into a tensor like
  // `total`, [1].
  void sum_over_grids(const Tensor& total, const std::function<void(ParameterGrid, const Tensor&)>& sum);

  const comm::Mesh& mesh_;
  Device& device_;
  parallel::FlatStore& store_;
  // Gradients of this rank, and main parameters on the device and in host memory.
  struct Buffers {
    std::vector<optim::FlatBuffer> gradients, on_device, on_host;
    // Sum over `on_host` in host memory, fp64 [1]; undefined: it is empty.
    Tensor host_squares;
  };
  Buffers dense_, expert_;
  Buffers& buffers_of(ParameterGrid grid) { return grid == ParameterGrid::expert ? expert_ : dense_; }
  // Adds up the losses of multi-token prediction of this rank's micro-batches.
  void sum_mtp_losses(const Tensor& sums);

  // kernels::StepValues in bytes, then the losses of multi-token prediction, then the statistics of routers;
  // and views of them.
  Tensor values_, losses_, gradient_squares_, zero_gradients_, parameter_squares_, fingerprint_, control_,
      mtp_losses_, routers_;
  std::vector<float> router_values_;
  std::vector<double> mtp_values_;
  // The sums of both grids, fp64 [2]; undefined: there is only the dense one.
  Tensor grid_sums_;
  // Tensors in the fingerprint.
  int64_t fingerprinted_ = 0;
};

}  // namespace capstan::train
