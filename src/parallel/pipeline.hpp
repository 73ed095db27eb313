// Runs the actions of one rank in a pipeline schedule: receives the input of an action, computes, sends the
// output.
#pragma once

#include "comm/mesh.hpp"
#include "ops/tensor_parallel.hpp"
#include "parallel/schedule.hpp"

namespace capstan::parallel {

// The forward and backward passes of the stages of a rank, which take and return hidden states and their
// gradients. Hidden states are undefined at the ends of the pipeline.
class StageComputation {
 public:
  virtual ~StageComputation() = default;
  // An uninitialized tensor for what an action receives: the hidden states of a forward pass, or the gradient
  // of those that the chunk has sent, as this rank holds them.
  virtual Tensor make_input(const PipelineAction& action) = 0;
  virtual Tensor forward(int64_t micro_batch, int64_t chunk, const Tensor& hidden_states) = 0;
  // Computes weight gradients too, unless the schedule has actions of their own for them.
  virtual Tensor backward(int64_t micro_batch, int64_t chunk, const Tensor& gradient) = 0;
  virtual void weight_gradients(int64_t micro_batch, int64_t chunk);
};

struct PipelineComm {
  // This rank's position in the pipeline, and the mesh with its links to the stages beside it.
  int64_t rank = 0;
  const comm::Mesh* mesh = nullptr;
  // Tensor ranks that hold the same rows each send an equal part of them, and gather the parts that they
  // receive.
  ops::TensorParallel tensor;
  // The input of the next action that receives one is received while this one computes, unless it depends on
  // this one.
  bool overlap_p2p = true;
  // Context whose observer receives the events "start receive of hidden states 3", "wait for gradient 0",
  // "send hidden states 2"; may be null.
  StepContext* context = nullptr;
};

PipelineComm pipeline_comm(const comm::Mesh& mesh, const ops::TensorParallel& tensor);

inline constexpr size_t kPendingSends = 2;

// An action sends its output as soon as it is computed. Up to kPendingSends tensors are under way on each
// link, so that a stage computes on while the next one has not received yet; a further send first waits for
// the oldest. For each micro-batch and direction, the tensor ranks of a stage together send the bytes of
// the hidden states.
void run_actions(const PipelineShape& shape, const std::vector<PipelineAction>& actions,
                 const PipelineComm& links, StageComputation& stages);

}  // namespace capstan::parallel
