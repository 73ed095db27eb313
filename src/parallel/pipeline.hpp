// Carries out one rank's list of a pipeline schedule: receives what a step needs, computes it, sends what a neighbour waits for.
#pragma once

#include "ops/tensor_parallel.hpp"
#include "parallel/schedule.hpp"

namespace capstan::parallel {

// What the stages of a rank compute. Streams are the activations between stages; at the ends of the pipeline they are undefined.
class PipelineWork {
 public:
  virtual ~PipelineWork() = default;
  // An uninitialised tensor for the stream of this micro-batch, as this rank holds it. Its gradient is of the same form.
  virtual Tensor boundary(int64_t micro_batch) = 0;
  virtual Tensor forward(int64_t micro_batch, int64_t chunk, const Tensor& hidden_states) = 0;
  virtual Tensor backward(int64_t micro_batch, int64_t chunk, const Tensor& gradient) = 0;
  virtual void weight(int64_t micro_batch, int64_t chunk) = 0;
};

struct PipelineLinks {
  comm::Communicator* stages = nullptr;  // the ranks of the pipeline, in the order of the stages
  ops::TensorParallel
      tensor;  // ranks that hold the same rows each send an equal run of them and gather what arrives
  bool early_receive = true;  // what the next step needs is asked for before this one is computed
  // Whose observer sees "ask for stream 3", "wait for gradient 0", "send stream 2" as events; null: nobody.
  StepContext* context = nullptr;
};

// A step sends as soon as it has computed; nobody waits for a send before the end, and the last stream sent in each direction is
// kept until the next. Bytes between two stages for each micro-batch
// and direction: the stream, over the tensor ranks together.
void run_steps(const PipelineShape& shape, const std::vector<ScheduleStep>& steps, const PipelineLinks& links,
               PipelineWork& work);

}  // namespace capstan::parallel
