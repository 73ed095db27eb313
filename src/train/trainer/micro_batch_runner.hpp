// Forward and backward passes of a step's micro-batches through this rank's stages of the model.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/mesh.hpp"
#include "config/sections/config.hpp"
#include "data/loader.hpp"
#include "models/model.hpp"
#include "parallel/pipeline.hpp"
#include "train/trainer/device_batch.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

// With one pipeline rank the micro-batches run one after the other; with several, in the order of the
// pipeline schedule.
class MicroBatchRunner final : private parallel::StageComputation {
 public:
  // The losses of the micro-batches on the last pipeline stage.
  struct Losses {
    // fp64 [micro-batches], on the device; undefined on the other stages.
    Tensor sums;
    // Sum of their loss weights.
    double tokens = 0;
    // fp64 [micro-batches, depths], of a training step: the losses of multi-token prediction, times
    // MtpInputs::loss_factor. Undefined on the other stages, or without it.
    Tensor mtp_sums;
    // Of a training step of a model with experts, on every stage: nn::RouterStatistics::sums().
    Tensor routers;
  };
  // Returns the m-th micro-batch. It is called once for each micro-batch in ascending order, one micro-batch
  // ahead of the computation; the reference stays valid until the next call.
  using Source = std::function<const data::MicroBatch&(int64_t)>;

  MicroBatchRunner(const config::Config& config, const comm::Mesh& mesh, Device& device,
                   const models::Model& model, ParamStore& store);

  // Adds the gradients of the summed loss to the store's gradient buffers.
  Losses forward_backward(int64_t micro_batches, const Source& source, StepTimers& timers,
                          TapeObserver* observer);

  // Multiplies the loss of the training steps from now on, and with it all gradients and Losses::sums.
  void set_loss_scale(double scale) { loss_scale_ = scale; }

  // Number of elements of Losses::routers.
  int64_t router_values() const { return router_statistics_ ? router_statistics_->sums().elements() : 0; }

  // Evaluation: no dropout, no gradients.
  Losses forward_only(int64_t micro_batches, const Source& source);
  // Takes the host buffers of that many micro-batches like this one, of training steps or of evaluation.
  void reserve_uploads(const data::MicroBatch& batch, int64_t micro_batches, bool training) {
    uploader_.reserve(batch, training && dropout_, micro_batches, training ? mtp_ : MtpInputs());
  }
  // For estimates: the next calls allocate the losses of at least so many micro-batches.
  void allocate_losses_of(int64_t micro_batches) { least_losses_ = micro_batches; }

 private:
  void begin(int64_t micro_batches, const Source& source, StepTimers* timers, TapeObserver* observer);
  bool pipelined() const { return shape_.ranks > 1 || shape_.chunks > 1; }
  std::vector<parallel::PipelineAction> forward_actions() const;
  // Starts the copies of the micro-batches up to this one, and that of the next one, which overlaps with this
  // one's computation.
  void load(int64_t micro_batch);
  // Copies the losses of a micro-batch to losses_.
  void add_losses(const models::Loss& loss);
  std::string range_name(const char* pass, int64_t micro_batch, int64_t chunk) const;
  void enter(Phase phase) {
    if (timers_) timers_->enter(phase);
  }

  Tensor make_input(const parallel::PipelineAction& action) override;
  Tensor forward(int64_t micro_batch, int64_t chunk, const Tensor& hidden_states) override;
  Tensor backward(int64_t micro_batch, int64_t chunk, const Tensor& gradient) override;
  void weight_gradients(int64_t micro_batch, int64_t chunk) override;

  const config::Config& config_;
  const models::Model& model_;
  ParamStore& store_;
  // Null: saved activations stay where they are.
  const std::unique_ptr<ActivationOffload> offload_;
  StepContext context_;
  parallel::PipelineShape shape_;
  parallel::PipelineComm links_;
  ContextShard context_shard_;
  BatchUploader uploader_;
  // Of training steps; none on ranks whose stages do not read them.
  const MtpInputs mtp_;
  // Null: the model has no experts.
  std::unique_ptr<nn::RouterStatistics> router_statistics_;
  double loss_scale_ = 1;
  bool dropout_;
  DType hidden_dtype_;
  // The gradient of the summed loss.
  Tensor one_;  // fp32 [1]
  // This rank's schedule of a training step of `scheduled_` micro-batches.
  std::vector<parallel::PipelineAction> actions_;
  int64_t scheduled_ = 0;

  // State of the current call. timers_ is null in evaluation.
  const Source* source_ = nullptr;
  StepTimers* timers_ = nullptr;
  Losses losses_;
  // Number of sums that losses_.sums holds so far.
  int64_t losses_known_ = 0;
  int64_t least_losses_ = 0;
  int64_t forwards_ = 0;
  // Rows of each micro-batch that was loaded, on this rank.
  std::vector<int64_t> rows_;
  // Loaded micro-batches, until their last forward pass on this rank.
  std::map<int64_t, PendingBatch> batches_;
  // Tape of each micro-batch and chunk, from its forward to its backward pass or its weight gradients.
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Tape>> tapes_;
};

}  // namespace capstan::train
