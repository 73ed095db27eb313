// Forward and backward of a step's micro-batches through this rank's stages of the model, in the order of the pipeline's
// schedule; without a pipeline one after the other.
#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "comm/mesh.hpp"
#include "config/core/config.hpp"
#include "data/loader.hpp"
#include "models/model.hpp"
#include "parallel/pipeline.hpp"
#include "train/trainer/setup.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

class BatchRunner final : private parallel::PipelineWork {
 public:
  // What the micro-batches gave on this rank: something on the last stage of a pipeline, nothing on the others.
  struct Sums {
    std::vector<Tensor> losses;  // fp64 [1] of each micro-batch, on the device
    double tokens = 0;           // with their loss weights
  };
  // The m-th micro-batch, asked for once for each in rising order; the reference holds until the next is asked for.
  using Source = std::function<const data::MicroBatch&(int64_t)>;

  BatchRunner(const config::Config& config, const comm::Mesh& mesh, Device& device,
              const models::Model& model, ParamStore& store);

  Sums train(int64_t micro_batches, const Source& source, StepTimers& timers, TapeObserver* observer);
  Sums evaluate(int64_t micro_batches, const Source& source);

 private:
  Sums run(int64_t micro_batches, const Source& source, StepTimers* timers, TapeObserver* observer);
  std::vector<parallel::ScheduleStep> forward_steps() const;
  void load(int64_t micro_batch);
  void enter(Phase phase) {
    if (timers_) timers_->enter(phase);
  }

  Tensor boundary(int64_t micro_batch) override;
  Tensor forward(int64_t micro_batch, int64_t chunk, const Tensor& hidden_states) override;
  Tensor backward(int64_t micro_batch, int64_t chunk, const Tensor& gradient) override;
  void weight(int64_t micro_batch, int64_t chunk) override;

  const config::Config& config_;
  const models::Model& model_;
  ParamStore& store_;
  StepContext context_;
  parallel::PipelineShape shape_;
  parallel::PipelineLinks links_;
  ContextShard cut_;
  bool dropout_;
  DType hidden_dtype_;
  Tensor one_;                                 // fp32 [1]: the gradient of the summed loss
  std::vector<parallel::ScheduleStep> steps_;  // this rank's of a training step, of as many micro-batches:
  int64_t scheduled_ = 0;

  // Of the run under way.
  const Source* source_ = nullptr;
  StepTimers* timers_ = nullptr;  // null: evaluation
  Sums sums_;
  int64_t forwards_ = 0;
  std::vector<int64_t> rows_;                 // of each micro-batch that was asked for, on this rank
  std::map<int64_t, models::Batch> batches_;  // until their last forward pass here
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Tape>> tapes_;  // by micro-batch and chunk
};

}  // namespace capstan::train
