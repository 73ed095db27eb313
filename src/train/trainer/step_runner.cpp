#include "train/trainer/step_runner.hpp"

#include <array>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/collective_errors.hpp"
#include "comm/reduce.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/schedule_setup.hpp"

namespace capstan::train {

namespace {
comm::Mesh connected_mesh(const config::Config& config, comm::World& world, Device& device) {
  comm::Mesh mesh(mesh_sizes(config, world.size()), world.rank());
  connect(mesh, config, world, device);
  return mesh;
}
}  // namespace

StepRunner::StepRunner(const config::Config& config, comm::World& world, std::unique_ptr<Device> device)
    : config_(config),
      world_(world.communicator()),
      device_(device
                  ? std::move(device)
                  : make_device(config.train.device, config.train.threads.value_or(0), world.local_size())),
      mesh_(connected_mesh(config, world, *device_)),
      model_(models::build(config.model, model_shard(config, mesh_))),
      schedule_(make_schedule(config, false)),
      decoupled_schedule_(make_schedule(config, config.optimizer.decoupled_lr.has_value())) {
  store_ = std::make_unique<parallel::FlatStore>(*device_, model_->parameters(), store_groups(mesh_),
                                                 store_options(config));
  optimizer_ = make_optimizer(config, *device_, *store_);
  statistics_ = std::make_unique<optim::FlatStatistics>(*device_);
  micro_batch_runner_ = std::make_unique<MicroBatchRunner>(config, mesh_, *device_, *model_, *store_);
  micro_batches_ = micro_batches_of(config, mesh_);
}

void StepRunner::initialize() {
  initialize_parameters(*store_, static_cast<uint64_t>(config_.rng.seed), device_->host_threads());
}

data::LoaderOptions StepRunner::loader_options() const {
  data::LoaderOptions options;
  options.data_parallel_rank = mesh_.index(comm::Axis::dp);
  options.data_parallel_size = mesh_.size(comm::Axis::dp);
  options.micro_batch_size = config_.train.micro_batch_size;
  options.global_batch_size = *config_.train.global_batch_size;
  options.consumed_samples = state_.consumed_samples;
  options.num_workers = static_cast<int>(config_.dataset.num_workers);
  return options;
}

StepResult StepRunner::train_step(data::Loader& loader, StepTimers& timers) {
  failure_anomalies_.clear();
  batch_.clear();
  timers.enter(Phase::other);
  begin_gradients();
  const auto losses = micro_batch_runner_->forward_backward(
      micro_batches_, [&](int64_t) -> const data::MicroBatch& { return batch_.emplace_back(loader.next()); },
      timers, observer_);
  const StepTotals totals = reduce_gradients(losses, timers);

  StepResult result;
  result.loss = totals.loss;
  result.gradient_norm = totals.norm;
  result.loss_tokens = static_cast<int64_t>(totals.tokens);
  result.learning_rate = schedule_.learning_rate(state_.schedule_samples);
  if (config_.logger.log_num_zeros_in_grad) {
    auto zeros = static_cast<double>(statistics_->count_zeros(optimizer_->buffers()));
    store_->sum_over_owners(std::span(&zeros, 1));
    result.num_zeros = static_cast<int64_t>(zeros);
  }

  const bool finite = std::isfinite(result.loss) && std::isfinite(result.gradient_norm);
  const bool failed = config_.resilience.check_for_nan && !finite;
  AnomalyDecision decision = detect_anomalies(config_.resilience, state_, result.loss, result.gradient_norm);
  result.events = std::move(decision.events);
  if (config_.resilience.rerun_mode != config::RerunMode::disabled && (failed || !result.events.empty()))
    rerun_and_compare(totals, timers, result.events);
  if (failed) fail_not_finite(totals, result.events);
  if (decision.action == config::SpikeAction::rewind) {
    result.rewind = true;
    return result;
  }

  result.skipped = decision.action == config::SpikeAction::skip ||
                   (config_.optimizer.grad_norm_skip_threshold &&
                    result.gradient_norm > *config_.optimizer.grad_norm_skip_threshold);
  if (!result.skipped) update(totals, result);
  if (config_.logger.log_params_norm) result.params_norm = parameter_norm();
  consume_batch();
  timers.enter(Phase::other);
  return result;
}

// Zeroes the gradients. With resilience.rerun_mode it also begins to hash the gradients of this rank.
void StepRunner::begin_gradients() {
  if (config_.resilience.rerun_mode != config::RerunMode::disabled) {
    fingerprint_.emplace();
    store_->on_local_gradients([this](const Tensor& gradients) { fingerprint_->take(gradients); });
  }
  store_->zero_gradients(state_.step);
}

// Reduces the gradients over the data-parallel ranks and computes loss and norm. The host waits for the
// device here, once.
StepRunner::StepTotals StepRunner::reduce_gradients(const MicroBatchRunner::Losses& losses,
                                                    StepTimers& timers) {
  StepTotals result;
  timers.enter(Phase::reduce);
  store_->finish_gradients();
  if (fingerprint_) {
    if (losses.sums.defined()) fingerprint_->take(losses.sums);
    result.fingerprint = fingerprint_->finish();
    store_->on_local_gradients(nullptr);
    fingerprint_.reset();
  }
  const LossTotal total = reduce_losses(losses);
  result.tokens = total.tokens;
  result.scale = total.tokens > 0 ? 1.0 / total.tokens : 0.0;
  result.loss = total.loss * result.scale;
  timers.enter(Phase::optimizer);
  double squares = statistics_->sum_of_squares(optimizer_->buffers());
  store_->sum_over_owners(std::span(&squares, 1));
  result.norm = std::sqrt(squares) * result.scale;
  return result;
}

// Sums over all ranks. Only the last pipeline stage has losses.
StepRunner::LossTotal StepRunner::reduce_losses(const MicroBatchRunner::Losses& losses) {
  std::array<double, 2> total{0.0, losses.tokens};
  if (losses.sums.defined())
    for (const double sum : losses.sums.to_host<double>()) total[0] += sum;
  comm::all_reduce(data_parallel(), total);
  comm::all_reduce(mesh_.group("pp"), total);
  return {total[0], total[1]};
}

void StepRunner::update(const StepTotals& totals, const StepResult& result) {
  optim::StepOptions step;
  step.lr = result.learning_rate;
  step.decoupled_lr = decoupled_schedule_.learning_rate(state_.schedule_samples);
  step.weight_decay = schedule_.weight_decay(state_.schedule_samples);
  step.gradient_scale = static_cast<float>(
      totals.scale * optim::clip_factor(result.gradient_norm, config_.optimizer.clip_grad));
  optimizer_->step(step);
  store_->after_update();
  // Skipped updates do not advance the schedule.
  state_.schedule_samples += *config_.train.global_batch_size;
  append_recent(config_.resilience, state_, result.loss, result.gradient_norm);
}

// Forward and backward passes on the micro-batches of the current step again.
MicroBatchRunner::Losses StepRunner::rerun_batch(StepTimers& timers, TapeObserver* observer) {
  return micro_batch_runner_->forward_backward(
      micro_batches_, [this](int64_t m) -> const data::MicroBatch& { return batch_[static_cast<size_t>(m)]; },
      timers, observer);
}

// Computes the same batch again from the same parameters. Healthy hardware gives the same bits.
void StepRunner::rerun_and_compare(const StepTotals& first, StepTimers& timers,
                                   std::vector<Anomaly>& events) {
  timers.enter(Phase::other);
  begin_gradients();
  const MicroBatchRunner::Losses losses = rerun_batch(timers, observer_);
  const StepTotals again = reduce_gradients(losses, timers);
  const auto differing = comm::gather_texts(world_, first.fingerprint == again.fingerprint ? "" : "x");
  std::string ranks;
  for (size_t r = 0; r < differing.size(); ++r)
    if (!differing[r].empty()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  const std::string step = std::to_string(state_.step + 1);
  Anomaly event{"rerun", "", "", {{"loss", first.loss}, {"loss_again", again.loss}}, {}};
  if (config_.resilience.rerun_mode == config::RerunMode::report_stats) {
    event.numbers.insert(event.numbers.end(), {{"grad_norm", first.norm},
                                               {"grad_norm_again", again.norm},
                                               {"loss_difference", again.loss - first.loss},
                                               {"grad_norm_difference", again.norm - first.norm}});
  }
  if (ranks.empty()) {
    event.text =
        "step " + step +
        " gave the same bits when computed again: the cause is the data or the model, not the hardware";
    event.texts.push_back({"cause", "data"});
    events.push_back(std::move(event));
    return;
  }
  event.text = "step " + step + " gave other bits on rank " + ranks +
               " when computed again: the cause is the hardware";
  event.texts.insert(event.texts.end(), {{"cause", "machine"}, {"ranks", ranks}});
  failure_anomalies_ = events;
  failure_anomalies_.push_back(event);
  fail(
      ErrorCode::rank_failure,
      event.text + "; parameters and optimizer state are unchanged since step " + std::to_string(state_.step),
      "resume the run on another machine: this machine's results cannot be trusted");
}

void StepRunner::fail_not_finite(const StepTotals& totals, std::vector<Anomaly> events) {
  const Anomaly cause = locate_not_finite(totals);
  failure_anomalies_ = std::move(events);
  failure_anomalies_.push_back(cause);
  const bool loss_is_finite = std::isfinite(totals.loss);
  fail(ErrorCode::failed,
       "step " + std::to_string(state_.step + 1) + ": the " + (loss_is_finite ? "gradient norm" : "loss") +
           " is " + to_text(loss_is_finite ? totals.norm : totals.loss) + " (" + cause.text +
           "); parameters and optimizer state are unchanged since step " + std::to_string(state_.step),
       "a lower optimizer.lr, a longer warm-up or another precision; resilience.check_for_nan=false goes "
       "on regardless");
}

// Finds the first value that is not finite by running the micro-batches again with a check of every
// operation. Collective.
Anomaly StepRunner::locate_not_finite(const StepTotals& totals) {
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
  Anomaly event{"not_finite", "", "", {{"loss", totals.loss}, {"grad_norm", totals.norm}}, {}};
  // Adds the finding of the first rank that has one. Collective.
  const auto append_first_finding = [&](const char* key, const std::string& found, const auto& text_of) {
    const auto all = comm::gather_texts(world_, found);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty()) continue;
      event.texts.push_back({key, all[rank]});
      event.text += (event.text.empty() ? "" : "; ") +
                    text_of(all[rank], all.size() > 1 ? "rank " + std::to_string(rank) : "");
      return;
    }
  };
  using Text = const std::string&;
  append_first_finding("parameter", parameter, [](Text name, Text rank) {
    return "parameter `" + name + "` itself is not finite" + (rank.empty() ? "" : " on " + rank);
  });
  append_first_finding("operation", operation, [](Text name, Text rank) {
    return "first in " + name + (rank.empty() ? "" : ", " + rank);
  });
  append_first_finding("gradient", gradient,
                       [](Text name, Text) { return "first gradient: `" + name + "`"; });
  if (event.text.empty()) event.text = "every operation's output is finite when it runs again";
  return event;
}

double StepRunner::parameter_norm() {
  double squares = statistics_->sum_of_squares(optimizer_->buffers(), &optim::FlatBuffer::main);
  store_->sum_over_owners(std::span(&squares, 1));
  return std::sqrt(squares);
}

void StepRunner::consume_batch() {
  const int64_t batch = *config_.train.global_batch_size;
  ++state_.step;
  state_.consumed_samples += batch;
  state_.consumed_tokens += batch * config_.model.seq_length;
}

double StepRunner::evaluate(std::shared_ptr<const data::Dataset> dataset, int64_t batches) {
  data::LoaderOptions options = loader_options();
  options.consumed_samples = 0;
  options.micro_batch_size =
      config_.validation.eval_micro_batch_size.value_or(config_.train.micro_batch_size);
  options.global_batch_size =
      config_.validation.eval_global_batch_size.value_or(*config_.train.global_batch_size);
  data::Loader loader(std::move(dataset), options);
  const int64_t micro_batches =
      batches * options.global_batch_size / (options.micro_batch_size * options.data_parallel_size);
  data::MicroBatch micro;
  const LossTotal total = reduce_losses(micro_batch_runner_->forward_only(
      micro_batches, [&](int64_t) -> const data::MicroBatch& { return micro = loader.next(); }));
  return total.tokens > 0 ? total.loss / total.tokens : 0.0;
}

}  // namespace capstan::train
