#include "train/trainer/step_runner.hpp"

#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/collective_errors.hpp"
#include "comm/reduce.hpp"
#include "config/sections/moe_layers.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/schedule_setup.hpp"

namespace capstan::train {

namespace {
comm::Mesh connected_mesh(const config::Config& config, Transport transport, comm::World& world,
                          Device& device) {
  comm::Mesh mesh(mesh_sizes(config, world.size()), world.rank());
  connect(mesh, transport, config, world, device);
  return mesh;
}
}  // namespace

StepRunner::StepRunner(const config::Config& config, comm::World& world, std::unique_ptr<Device> device)
    : config_(config),
      world_(world.communicator()),
      device_(device ? std::move(device) : make_device(config, local_rank_of(world))),
      transport_(choose_transport(config, world, gpu_of(world, *device_))),
      mesh_(connected_mesh(config, transport_.transport, world, *device_)),
      model_(models::build(config.model, model_shard(config, mesh_))),
      schedule_(make_schedule(config, false)),
      decoupled_schedule_(make_schedule(config, config.optimizer.decoupled_lr.has_value())),
      batch_ramp_(config) {
  limit_memory(*device_, config.resilience);
  store_ = std::make_unique<parallel::FlatStore>(*device_, model_->parameters(), store_groups(mesh_),
                                                 store_options(config, world.rank()));
  optimizer_ = make_optimizer(config, *device_, *store_);
  micro_batch_runner_ = std::make_unique<MicroBatchRunner>(config, mesh_, *device_, *model_, *store_);
  totals_ = std::make_unique<StepTotals>(mesh_, *device_, *store_, *optimizer_,
                                         micro_batch_runner_->router_values(),
                                         config.model.mtp_num_layers.value_or(0));
  expert_biases_ = std::make_unique<ExpertBiases>(config, *model_, *store_);
  if (reruns())
    store_->on_local_gradients([this](const Tensor& gradients) { totals_->add_to_fingerprint(gradients); });
  if (config.mixed_precision.params_dtype == config::Precision::fp16) scale_loss(config.mixed_precision);
}

void StepRunner::initialize() {
  initialize_parameters(*store_, static_cast<uint64_t>(config_.rng.seed), device_->host_threads());
}

data::LoaderOptions StepRunner::loader_options() const {
  data::LoaderOptions options;
  options.data_parallel_rank = mesh_.index(comm::Axis::dp);
  options.data_parallel_size = mesh_.size(comm::Axis::dp);
  options.micro_batch_size = config_.train.micro_batch_size;
  options.global_batch_size = config::full_batch_size(config_);
  options.consumed_samples = state_.consumed_samples;
  options.num_workers = static_cast<int>(config_.dataset.num_workers);
  return options;
}

int64_t StepRunner::micro_batches() const {
  return global_batch_size() / (config_.train.micro_batch_size * mesh_.size(comm::Axis::dp));
}

StepResult StepRunner::train_step(data::Loader& loader, StepTimers& timers) try {
  const RangeScope range(*device_, [&] { return "step " + std::to_string(state_.step + 1); });
  failure_anomalies_.clear();
  batch_.clear();
  timers.enter(Phase::other);
  choose_graphs();
  begin_loss_scale();
  begin_gradients();
  const auto losses = micro_batch_runner_->forward_backward(
      micro_batches(), [&](int64_t) -> const data::MicroBatch& { return batch_.emplace_back(loader.next()); },
      timers, observer_);
  const int64_t updates = optimizer_->steps();
  StepResult result;
  result.global_batch_size = global_batch_size();
  result.learning_rate = schedule_.learning_rate(state_.schedule_samples);
  if (loss_scaler_) result.loss_scale = state_.loss_scale->scale;
  reduce_gradients(losses, limits_of_step(), timers);
  launch_update(result.learning_rate);
  StepValues values = read_values();
  if (values.control.skip != 0) optimizer_->set_steps(updates);

  const config::SpikeAction action = check_values(values, result);
  const bool failed = ends_run(values);
  // A rerun comes before the update.
  const bool held = reruns() && (failed || !result.anomalies.empty());
  CAPSTAN_ASSERT((values.control.skip != 0) == (failed || result.skipped || held),
                 "the device and the host decide differently about an update");
  if (held) rerun_and_compare(values, timers, result.anomalies);
  if (failed) fail_not_finite(values, result.anomalies);
  // Megatron's rules: only values that are not finite are an overflow, and a step whose update is skipped for
  // another reason is a clean one. After a rewind, the scale is that of the checkpoint.
  if (loss_scaler_) loss_scaler_->update(*state_.loss_scale, result.overflow);
  if (action == config::SpikeAction::rewind) {
    result.skipped = false;
    result.rewind = true;
    return result;
  }
  if (held && !result.skipped) {
    launch_update(result.learning_rate);
    values = read_values();
  }
  if (config_.logger.log_params_norm) result.params_norm = std::sqrt(values.parameter_squares);
  result.routers = router_results();
  result.mtp_losses = mtp_losses(values.loss_tokens);
  if (!result.skipped) count_update(result);
  consume_batch();
  timers.enter(Phase::other);
  return result;
} catch (Error& error) {
  if (error.code() != ErrorCode::no_fit) throw;
  throw error.in("in step " + std::to_string(state_.step + 1));
}

std::vector<RouterResult> StepRunner::router_results() const {
  std::vector<RouterResult> results;
  const auto batches = static_cast<double>(micro_batches() * mesh_.size(comm::Axis::dp));
  const std::vector<config::BalanceLoss> losses = config::balance_losses(config_.model);
  auto value = totals_->router_values().begin();
  for (const int64_t layer : config::router_layers(config_.model)) {
    RouterResult& result = results.emplace_back();
    result.layer = layer;
    result.load.assign(value, value + *config_.model.num_moe_experts);
    value += *config_.model.num_moe_experts;
    result.choices = std::accumulate(result.load.begin(), result.load.end(), 0.0);
    for (double& load : result.load) load = result.choices > 0 ? load / result.choices : 0;
    for (const config::BalanceLoss& loss : losses) {
      result.balance_losses.emplace_back(loss.type, *value++ / batches);
      result.balance_loss += result.balance_losses.back().second;
    }
    result.z_loss = *value++ / batches;
    if (config_.model.moe_expert_capacity_factor) result.dropped = *value;
    ++value;
  }
  return results;
}

std::vector<double> StepRunner::mtp_losses(double loss_tokens) const {
  std::vector<double> losses = totals_->mtp_sums();
  const config::ModelConfig& m = config_.model;
  const double scale = loss_scaler_ ? scale_of_sums() : 1.0;
  const double factor = m.mtp_loss_scaling_factor / static_cast<double>(losses.size()) * scale;
  for (double& loss : losses) loss = loss_tokens > 0 ? loss / (loss_tokens * factor) : 0;
  return losses;
}

// With a dynamic loss scale, a norm that is not finite is an overflow, and the scale is reduced. A loss that
// is not finite ends the run, because another scale would not change it (Megatron's
// check_for_nan_in_loss_and_grad), unless loss times scale leaves the range of fp32.
bool StepRunner::ends_run(const StepValues& values) const {
  constexpr double kMaxSafeLossScale = 0x1p64;
  if (!config_.resilience.check_for_nan) return false;
  if (!loss_scaler_ || !loss_scaler_->is_dynamic()) return !is_finite(values);
  return !std::isfinite(values.loss) && state_.loss_scale->scale <= kMaxSafeLossScale;
}

bool StepRunner::is_finite(const StepValues& values) {
  return std::isfinite(values.loss) && std::isfinite(values.norm);
}

// Sets the values of the step in `result`, and whether its update is skipped, by the rules of
// limits_of_step(). Returns the action that anomalies ask for.
config::SpikeAction StepRunner::check_values(const StepValues& values, StepResult& result) const {
  result.loss = values.loss;
  result.gradient_norm = values.norm;
  result.loss_tokens = static_cast<int64_t>(values.loss_tokens);
  if (config_.logger.log_num_zeros_in_grad) result.num_zeros = values.zero_gradients;
  AnomalyDecision decision = detect_anomalies(config_.resilience, state_, values.loss, values.norm);
  const auto& threshold = config_.optimizer.grad_norm_skip_threshold;
  result.overflow = loss_scaler_ && !is_finite(values);
  result.skipped = decision.action >= config::SpikeAction::skip || (threshold && values.norm > *threshold) ||
                   result.overflow;
  result.anomalies = std::move(decision.anomalies);
  return decision.action;
}

// An observer's events lie between the launches, and would divide the graphs.
void StepRunner::choose_graphs() {
  device_->use_graphs(launches_graphs(config_.model, begun_steps_++) && allows_graphs_ && !observer_);
}

void StepRunner::begin_loss_scale() {
  if (!loss_scaler_) return;
  if (!state_.loss_scale) state_.loss_scale = loss_scaler_->initial();
  micro_batch_runner_->set_loss_scale(scale_of_sums());
}

// The number of loss tokens is known after the micro-batches only. The power of two that is not below the
// number of all tokens changes no bit.
double StepRunner::scale_of_sums() const {
  const auto tokens = static_cast<uint64_t>(global_batch_size() * config_.model.seq_length);
  return state_.loss_scale->scale / static_cast<double>(std::bit_ceil(tokens));
}

// Zeroes the gradients and the fingerprint of the step.
void StepRunner::begin_gradients() {
  if (reruns()) totals_->clear_fingerprint();
  store_->zero_gradients(state_.step);
}

// Reduces gradients and losses over the ranks and decides on the update, on the device.
void StepRunner::reduce_gradients(const MicroBatchRunner::Losses& losses, const kernels::StepLimits& limits,
                                  StepTimers& timers) {
  const RangeScope range(*device_, [] { return std::string("reduce gradients"); });
  timers.enter(Phase::reduce);
  store_->finish_gradients();
  if (reruns() && losses.sums.defined()) totals_->add_to_fingerprint(losses.sums);
  totals_->sum_losses(losses);
  timers.enter(Phase::optimizer);
  totals_->sum_gradients(config_.logger.log_num_zeros_in_grad);
  totals_->decide(limits);
}

// The limits above which the update of this step is skipped. With reruns also those above which it waits
// until the batch is computed again.
kernels::StepLimits StepRunner::limits_of_step() const {
  const config::ResilienceConfig& r = config_.resilience;
  kernels::StepLimits limits;
  limits.clip = config_.optimizer.clip_grad;
  if (loss_scaler_) limits.loss_scale = scale_of_sums();
  const auto holds = [&](config::SpikeAction action) {
    return action >= config::SpikeAction::skip || (action != config::SpikeAction::off && reruns());
  };
  const SpikeLimits spikes = spike_limits(r, state_);
  if (spikes.loss && holds(r.loss_spike_action)) limits.loss_spike = *spikes.loss;
  if (spikes.norm && holds(r.grad_norm_spike_action)) limits.norm_spike = *spikes.norm;
  limits.largest_norm = config_.optimizer.grad_norm_skip_threshold.value_or(kernels::StepLimits::kNone);
  limits.require_finite = r.check_for_nan || loss_scaler_ ? 1 : 0;
  return limits;
}

kernels::StepValues StepRunner::read_values() {
  const RangeScope range(*device_, [] { return std::string("wait for the step"); });
  return totals_->read();
}

void StepRunner::launch_update(double learning_rate) {
  const RangeScope range(*device_, [] { return std::string("optimizer"); });
  optim::StepOptions step;
  step.lr = learning_rate;
  step.decoupled_lr = decoupled_schedule_.learning_rate(state_.schedule_samples);
  step.weight_decay = schedule_.weight_decay(state_.schedule_samples);
  optimizer_->step(step, totals_->control());
  expert_biases_->update(totals_->router_sums(), totals_->control());
  store_->after_update(totals_->control());
  if (config_.logger.log_params_norm) totals_->sum_parameters();
}

// Skipped updates do not advance the schedule.
void StepRunner::count_update(const StepResult& result) {
  state_.schedule_samples += result.global_batch_size;
  append_recent(config_.resilience, state_, result.loss, result.gradient_norm);
}

// Forward and backward passes on the micro-batches of the current step again.
MicroBatchRunner::Losses StepRunner::rerun_batch(StepTimers& timers, TapeObserver* observer) {
  return micro_batch_runner_->forward_backward(
      micro_batches(),
      [this](int64_t m) -> const data::MicroBatch& { return batch_[static_cast<size_t>(m)]; }, timers,
      observer);
}

// Computes the same batch again from the same parameters. Healthy hardware gives the same bits.
void StepRunner::rerun_and_compare(const StepValues& first, StepTimers& timers,
                                   std::vector<Anomaly>& anomalies) {
  timers.enter(Phase::other);
  begin_gradients();
  const MicroBatchRunner::Losses losses = rerun_batch(timers, observer_);
  // The update that may follow has no other limits.
  kernels::StepLimits limits;
  limits.clip = config_.optimizer.clip_grad;
  limits.loss_scale = limits_of_step().loss_scale;
  reduce_gradients(losses, limits, timers);
  const StepValues again = read_values();
  const auto differing = comm::gather_texts(world_, first.fingerprint == again.fingerprint ? "" : "x");
  std::string ranks;
  for (size_t r = 0; r < differing.size(); ++r)
    if (!differing[r].empty()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  Anomaly anomaly{"rerun", "", "", {{"loss", first.loss}, {"loss_again", again.loss}}, {}};
  if (config_.resilience.rerun_mode == config::RerunMode::report_stats) {
    anomaly.numbers.insert(anomaly.numbers.end(), {{"grad_norm", first.norm},
                                                   {"grad_norm_again", again.norm},
                                                   {"loss_difference", again.loss - first.loss},
                                                   {"grad_norm_difference", again.norm - first.norm}});
  }
  if (ranks.empty()) {
    anomaly.text =
        "it gave the same bits when computed again: the cause is the data or the model, not the hardware";
    anomaly.texts.push_back({"cause", "data"});
    anomalies.push_back(std::move(anomaly));
    return;
  }
  anomaly.text =
      "it gave different bits on rank " + ranks + " when computed again: the cause is the hardware";
  anomaly.texts.insert(anomaly.texts.end(), {{"cause", "hardware"}, {"ranks", ranks}});
  failure_anomalies_ = anomalies;
  failure_anomalies_.push_back(anomaly);
  fail(ErrorCode::rank_failure,
       "step " + std::to_string(state_.step + 1) + ": " + anomaly.text +
           "; parameters and optimizer state are unchanged since step " + std::to_string(state_.step),
       "{resume_elsewhere} on another machine: this machine's results cannot be trusted");
}

void StepRunner::fail_not_finite(const StepValues& values, std::vector<Anomaly> anomalies) {
  const Anomaly cause = locate_not_finite(values);
  failure_anomalies_ = std::move(anomalies);
  failure_anomalies_.push_back(cause);
  const bool loss_is_finite = std::isfinite(values.loss);
  fail(ErrorCode::failed,
       "step " + std::to_string(state_.step + 1) + ": the " + (loss_is_finite ? "gradient norm" : "loss") +
           " is " + to_text(loss_is_finite ? values.norm : values.loss) + " (" + cause.text +
           "); parameters and optimizer state are unchanged since step " + std::to_string(state_.step),
       "try a lower optimizer.lr, a longer warm-up or another precision; resilience.check_for_nan=false goes "
       "on regardless");
}

// Finds the first value that is not finite by running the micro-batches again with a check of every
// operation. Collective.
Anomaly StepRunner::locate_not_finite(const StepValues& values) {
  const auto name_of = [](const Parameter* parameter) {
    return parameter ? parameter->name() : std::string();
  };
  // The backward pass reaches the last parameter of the list first.
  const Parameter* bad = first_nonfinite_gradient(*store_);
  const auto last =
      static_cast<int>(comm::all_reduce(data_parallel(), bad ? bad->index() : -1, comm::ReduceOp::max));
  const std::string gradient = last < 0 ? "" : model_->parameters()[static_cast<size_t>(last)]->name();
  const std::string parameter = name_of(first_nonfinite_parameter(*store_));
  FiniteCheck check;
  StepTimers timers;
  store_->zero_gradients(state_.step);
  rerun_batch(timers, &check);
  // Completes the reductions that the backward pass has started.
  store_->finish_gradients();
  std::string operation;
  if (!check.found().empty())
    operation = check.found() + " in micro-batch " + std::to_string(check.micro_batch() + 1) + " of " +
                std::to_string(batch_.size());
  Anomaly anomaly{"not_finite", "", "", {{"loss", values.loss}, {"grad_norm", values.norm}}, {}};
  // Adds the finding of the first rank that has one. Collective.
  const auto append_first_finding = [&](const char* key, const std::string& found, const auto& text_of) {
    const auto all = comm::gather_texts(world_, found);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty()) continue;
      anomaly.texts.push_back({key, all[rank]});
      anomaly.text += (anomaly.text.empty() ? "" : "; ") +
                      text_of(all[rank], all.size() > 1 ? "rank " + std::to_string(rank) : "");
      return;
    }
  };
  using Text = const std::string&;
  append_first_finding("parameter", parameter, [](Text name, Text rank) {
    return "parameter `" + name + "` itself is not finite" + (rank.empty() ? "" : " on " + rank);
  });
  append_first_finding("operation", operation, [](Text name, Text rank) {
    return "the first value that is not finite is in " + name + (rank.empty() ? "" : ", " + rank);
  });
  append_first_finding("gradient", gradient,
                       [](Text name, Text) { return "first gradient: `" + name + "`"; });
  if (anomaly.text.empty()) anomaly.text = "every operation's output is finite when it runs again";
  return anomaly;
}

void StepRunner::consume_batch() {
  const int64_t batch = global_batch_size();
  ++state_.step;
  state_.consumed_samples += batch;
  state_.consumed_tokens += batch * config_.model.seq_length;
}

double StepRunner::evaluate(std::shared_ptr<const data::Dataset> dataset, int64_t batches) {
  data::LoaderOptions options = loader_options();
  options.consumed_samples = 0;
  options.micro_batch_size =
      config_.validation.eval_micro_batch_size.value_or(config_.train.micro_batch_size);
  options.global_batch_size = config::eval_batch_size(config_);
  data::Loader loader(std::move(dataset), options);
  const int64_t micro_batches =
      batches * options.global_batch_size / (options.micro_batch_size * options.data_parallel_size);
  data::MicroBatch micro;
  totals_->sum_losses(micro_batch_runner_->forward_only(
      micro_batches, [&](int64_t) -> const data::MicroBatch& { return micro = loader.next(); }));
  const StepValues values = totals_->read();
  return values.loss_tokens > 0 ? values.loss_sum / values.loss_tokens : 0.0;
}

}  // namespace capstan::train
