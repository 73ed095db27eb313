// One rank's training state in memory (device, mesh, model, parameters, optimizer, schedules) and one
// training step on it.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/mesh.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/config.hpp"
#include "models/registry.hpp"
#include "optim/loss_scaler.hpp"
#include "optim/optimizer.hpp"
#include "optim/schedule.hpp"
#include "parallel/flat_store.hpp"
#include "train/setup/state.hpp"
#include "train/setup/transport.hpp"
#include "train/trainer/anomaly.hpp"
#include "train/trainer/expert_bias.hpp"
#include "train/trainer/micro_batch_runner.hpp"
#include "train/trainer/step_totals.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

// Statistics of one layer's router in a step.
struct RouterResult {
  int64_t layer = 0;
  // How often tokens chose an expert, and how many of these choices were dropped; nullopt: experts have no
  // capacity.
  double choices = 0;
  std::optional<double> dropped;
  // The fraction of the choices that fell on each expert.
  std::vector<double> load;
  // Means over the micro-batches, times their coefficients; balance_loss: their sum.
  std::vector<std::pair<config::RouterBalancing, double>> balance_losses;
  double balance_loss = 0, z_loss = 0;
  // The load of the expert with most tokens, relative to an equal load.
  double max_load() const {
    return *std::max_element(load.begin(), load.end()) * static_cast<double>(load.size());
  }
};

struct StepResult {
  // Mean over the step's loss tokens, the tokens whose loss_mask is set.
  double loss = 0;
  // Gradient norm of the mean loss, before clipping.
  double gradient_norm = 0;
  double learning_rate = 0;
  // Number of loss tokens of all ranks.
  int64_t loss_tokens = 0;
  // Samples of the step, which grow with train.rampup_batch_size.
  int64_t global_batch_size = 0;
  // Elements of the gradients that are zero, over the full model; with logger.log_num_zeros_in_grad.
  std::optional<int64_t> num_zeros;
  // L2 norm of the trained parameters of the full model after the update; with logger.log_params_norm.
  std::optional<double> params_norm;
  // The scale of the loss in this step, where it is scaled.
  std::optional<double> loss_scale;
  // Of each MoE layer.
  std::vector<RouterResult> routers;
  // Of each depth of multi-token prediction: mean over the rows of the batch, weighted with their loss
  // tokens, of the mean loss of a row's tokens that have a label at this depth.
  std::vector<double> mtp_losses;
  // The update was left out because of a spike, optimizer.grad_norm_skip_threshold or an overflow.
  bool skipped = false;
  // The scaled loss or its gradients are not finite.
  bool overflow = false;
  // A spike requires a rewind to the last checkpoint. Parameters and counters are those before the step.
  bool rewind = false;
  std::vector<Anomaly> anomalies;
};

class StepRunner {
 public:
  // Builds device, mesh, model, schedules, parameter store and optimizer, in this order. Parameters have no
  // values yet. device: null for that of train.device.
  StepRunner(const config::Config& config, comm::World& world, std::unique_ptr<Device> device = nullptr);
  // Waits for pending transfers. The observer does not see them, because it may have been destroyed already.
  ~StepRunner() { observe(nullptr); }

  // Initial parameters from rng.seed.
  void initialize();

  // One training step on the next global batch: forward and backward passes of all micro-batches, reduction
  // of the gradients, clipping, update. The device decides whether the update changes anything, and the host
  // waits for it once, at the end. Throws ErrorCode::failed if the loss or the gradient norm is not finite
  // (with resilience.check_for_nan; dynamic loss scaling skips the update for the norm). With
  // resilience.rerun_mode a step with a spike or a value that is not finite is computed again:
  // ErrorCode::rank_failure if a rank computes different bits. Both errors are thrown before parameters
  // change, and failure_anomalies() has the cause. Collective.
  StepResult train_step(data::Loader& loader, StepTimers& timers);
  const std::vector<Anomaly>& failure_anomalies() const { return failure_anomalies_; }

  // Scales the loss of training steps from now on, from TrainState::loss_scale or the initial scale on.
  void scale_loss(const config::MixedPrecisionConfig& config) { loss_scaler_.emplace(config); }

  // Counts the next global batch as consumed and the step as done, without an update.
  void consume_batch();

  // Mean loss per loss token over the first `batches` batches of validation.eval_global_batch_size samples of
  // the split. Collective.
  double evaluate(std::shared_ptr<const data::Dataset> dataset, int64_t batches);

  // `observer` sees every operation of the training steps, and the store's collectives, from now on; null: no
  // observer.
  void observe(TapeObserver* observer) {
    observer_ = observer;
    store_->observe(observer);
    device_->listen(observer ? [observer](const QueueSpan& span) { observer->queue_span(span); }
                             : std::function<void(const QueueSpan&)>());
  }

  // Whether steps after the warm-up use the CUDA graphs of model.cuda_graph_impl; at first they may.
  void allow_graphs(bool allow) { allows_graphs_ = allow; }

  // Replaces the recipe's own schedules.
  void set_schedules(const optim::Schedule& schedule, const optim::Schedule& decoupled) {
    schedule_ = schedule, decoupled_schedule_ = decoupled;
  }

  Device& device() { return *device_; }
  const TransportChoice& transport() const { return transport_; }
  const models::Model& model() const { return *model_; }
  parallel::FlatStore& store() { return *store_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  TrainState& state() { return state_; }
  const TrainState& state() const { return state_; }
  const comm::Mesh& mesh() const { return mesh_; }
  comm::Communicator& data_parallel() { return mesh_.group("dp-cp"); }
  // Samples of the next step, and micro-batches of each rank in it.
  int64_t global_batch_size() const { return batch_ramp_.size_at(state_.consumed_samples); }
  int64_t micro_batches() const;
  data::LoaderOptions loader_options() const;

 private:
  using StepValues = kernels::StepValues;
  bool reruns() const { return config_.resilience.rerun_mode != config::RerunMode::disabled; }
  // Whether the launches of the next step are graphs (model.cuda_graph_impl).
  void choose_graphs();
  void begin_loss_scale();
  // The factor of the sums of losses, and so of their gradients. The loss scale is that of the mean loss, as
  // in Megatron: sums over the tokens of a batch would leave the range of fp16 at any scale.
  double scale_of_sums() const;
  void begin_gradients();
  MicroBatchRunner::Losses rerun_batch(StepTimers& timers, TapeObserver* observer);
  void reduce_gradients(const MicroBatchRunner::Losses& losses, const kernels::StepLimits& limits,
                        StepTimers& timers);
  kernels::StepLimits limits_of_step() const;
  // Waits for the device.
  StepValues read_values();
  void launch_update(double learning_rate);
  config::SpikeAction check_values(const StepValues& values, StepResult& result) const;
  // Whether a loss or a norm that is not finite ends the run.
  bool ends_run(const StepValues& values) const;
  static bool is_finite(const StepValues& values);
  void count_update(const StepResult& result);
  // From the values that were read last.
  std::vector<RouterResult> router_results() const;
  std::vector<double> mtp_losses(double loss_tokens) const;
  void rerun_and_compare(const StepValues& first, StepTimers& timers, std::vector<Anomaly>& anomalies);
  [[noreturn]] void fail_not_finite(const StepValues& values, std::vector<Anomaly> anomalies);
  Anomaly locate_not_finite(const StepValues& values);

  const config::Config& config_;
  comm::Communicator& world_;
  std::unique_ptr<Device> device_;
  TransportChoice transport_;
  comm::Mesh mesh_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<parallel::FlatStore> store_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::Schedule schedule_, decoupled_schedule_;
  TrainState state_;
  std::unique_ptr<MicroBatchRunner> micro_batch_runner_;
  std::unique_ptr<StepTotals> totals_;
  std::unique_ptr<ExpertBiases> expert_biases_;
  const config::BatchRamp batch_ramp_;
  std::optional<optim::LossScaler> loss_scaler_;
  // Steps that this process has begun.
  int64_t begun_steps_ = 0;
  bool allows_graphs_ = true;
  // Micro-batches of the current step, which a rerun uses again.
  std::vector<data::MicroBatch> batch_;
  std::vector<Anomaly> failure_anomalies_;
  TapeObserver* observer_ = nullptr;
};

}  // namespace capstan::train
