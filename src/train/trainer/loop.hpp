// One training run in memory: the parts, and one step of the loop. The trainer drives it and keeps the records.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "comm/mesh.hpp"
#include "config/core/config.hpp"
#include "models/registry.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/trainer/anomaly.hpp"
#include "train/trainer/batch_runner.hpp"
#include "train/trainer/setup.hpp"
#include "train/trainer/state.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

struct StepResult {
  double loss = 0;           // mean over the step's loss tokens
  double gradient_norm = 0;  // before clipping, of the mean loss
  double learning_rate = 0;
  int64_t loss_tokens = 0;  // of all ranks
  // Of the whole model, each parameter counted once; with logger.log_num_zeros_in_grad, log_params_norm.
  std::optional<int64_t> num_zeros;   // elements of the gradients that are zero
  std::optional<double> params_norm;  // L2 norm of the parameters that train, after the update
  bool skipped = false;               // grad_norm_skip_threshold or a spike: the update was left out
  bool rewind = false;  // a spike that asks to go back to the last checkpoint: nothing has changed yet
  std::vector<Anomaly> events;
};

class Loop {
 public:
  Loop(const config::Config& config, comm::World& world);

  // Fresh parameters from rng.seed.
  void initialize();

  // One step on the next global batch. Throws ErrorCode::failed when the loss or the gradient norm is not finite, and
  // ErrorCode::rank_failure when a rank computed a suspicious step twice with different bits; both before the optimizer has
  // touched anything, with the place in failure_anomalies().
  StepResult step(data::Loader& loader, StepTimers& timers);
  const std::vector<Anomaly>& failure_anomalies() const { return failure_anomalies_; }
  // The next global batch counts as seen, without an update.
  void pass_over_batch();

  // Mean loss over `batches` global batches from the start of the split.
  double evaluate(std::shared_ptr<const data::Dataset> dataset, int64_t batches);

  // Sees every operation of the training steps, and the store's collectives, from now on; null: nobody does.
  void observe(TapeObserver* observer) {
    observer_ = observer;
    store_->observe(observer);
  }

  // Takes the place of the recipe's own schedules.
  void set_schedules(const optim::Schedule& schedule, const optim::Schedule& decoupled) {
    schedule_ = schedule, decoupled_schedule_ = decoupled;
  }

  Device& device() { return *device_; }
  const models::Model& model() const { return *model_; }
  parallel::FlatStore& store() { return *store_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  TrainState& state() { return state_; }
  const comm::Mesh& mesh() const { return mesh_; }
  comm::Communicator& data_parallel() { return mesh_.group("dp-cp"); }
  int64_t micro_batches() const { return micro_batches_; }
  data::LoaderOptions loader_options() const;

 private:
  // The batch at hand, or with a loader the next one: kept, because a guard may have to run it again.
  BatchRunner::Sums forward_backward(data::Loader* loader, StepTimers& timers);
  std::array<double, 2> total(const BatchRunner::Sums& sums);  // {loss, tokens} of all ranks

  struct Computed {
    double loss = 0, norm = 0, scale = 0, tokens = 0;
    std::string fingerprint;  // of this rank's own gradients and losses; with resilience.rerun_mode
  };
  Computed compute(data::Loader* loader /* null: the batch of before, again */, StepTimers& timers);
  void compute_again(const Computed& first, StepTimers& timers, std::vector<Anomaly>& events);
  Anomaly locate(const Computed& computed);
  double parameter_norm();

  const config::Config& config_;
  comm::Communicator& world_;
  comm::Mesh mesh_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<parallel::FlatStore> store_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::GradientNorm> norm_;
  std::vector<optim::FlatBuffer> buffers_;
  optim::Schedule schedule_, decoupled_schedule_;
  TrainState state_;
  std::unique_ptr<BatchRunner> runner_;
  int64_t micro_batches_ = 1;
  std::vector<data::MicroBatch> batch_;  // of the step: a guard may have to run it again
  std::vector<Anomaly> failure_anomalies_;
  TapeObserver* observer_ = nullptr;
};

}  // namespace capstan::train
