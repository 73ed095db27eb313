#include "train/trainer/loop.hpp"

#include <array>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "comm/together.hpp"

namespace capstan::train {

namespace {
comm::Mesh connected_mesh(const config::Config& config, comm::World& world) {
  comm::Mesh mesh(mesh_sizes(config, world.size()), world.rank());
  mesh.connect(world.communicator());
  return mesh;
}
}  // namespace

Loop::Loop(const config::Config& config, comm::World& world)
    : config_(config),
      world_(world.communicator()),
      mesh_(connected_mesh(config, world)),
      device_(make_device(config.train.device, config.train.threads.value_or(0), world.local_size())),
      model_(models::build(config.model, model_shard(config, mesh_))),
      schedule_(make_schedule(config, false)),
      decoupled_schedule_(make_schedule(config, config.optimizer.decoupled_lr.has_value())) {
  store_ = std::make_unique<parallel::FlatStore>(*device_, model_->parameters(), store_groups(mesh_),
                                                 store_options(config));
  buffers_ = store_->flat_buffers();
  optimizer_ = optim::build(config.optimizer, *device_, buffers_);
  norm_ = std::make_unique<optim::GradientNorm>(*device_);
  runner_ = std::make_unique<BatchRunner>(config, mesh_, *device_, *model_, *store_);
  micro_batches_ = micro_batches_of(config, mesh_);
}

void Loop::initialize() {
  initialize_parameters(*store_, static_cast<uint64_t>(config_.rng.seed), *device_->context().pool);
}

data::LoaderOptions Loop::loader_options() const {
  data::LoaderOptions options;
  options.data_parallel_rank = mesh_.index(comm::Axis::dp);
  options.data_parallel_size = mesh_.size(comm::Axis::dp);
  options.micro_batch_size = config_.train.micro_batch_size;
  options.global_batch_size = *config_.train.global_batch_size;
  options.consumed_samples = state_.consumed_samples;
  options.num_workers = static_cast<int>(config_.dataset.num_workers);
  return options;
}

BatchRunner::Sums Loop::forward_backward(data::Loader* loader, StepTimers& timers) {
  store_->zero_gradients();
  if (loader) batch_.clear();
  return runner_->train(
      micro_batches_,
      [&](int64_t m) -> const data::MicroBatch& {
        if (loader) batch_.push_back(loader->next());
        return batch_[static_cast<size_t>(m)];
      },
      timers, observer_);
}

std::array<double, 2> Loop::total(const BatchRunner::Sums& sums) {
  // Read only now: until here the host did not wait for the device.
  std::array<double, 2> result{0.0, sums.tokens};
  for (const Tensor& loss : sums.losses) result[0] += loss.to_host<double>()[0];
  comm::all_reduce(data_parallel(), result);
  comm::all_reduce(mesh_.group("pp"), result);  // the last stage's
  return result;
}

Loop::Computed Loop::compute(data::Loader* loader, StepTimers& timers) {
  timers.enter(Phase::other);
  Fingerprint own;
  const bool watched = config_.resilience.rerun_mode != config::RerunMode::disabled;
  if (watched) store_->watch_gradients([&](const Tensor& gradients) { own.take(gradients); });
  const BatchRunner::Sums sums = forward_backward(loader, timers);
  Computed result;
  timers.enter(Phase::reduce);
  store_->finish_gradients();
  if (watched) {
    for (const Tensor& loss : sums.losses) own.take(loss);
    result.fingerprint = own.finish();
    store_->watch_gradients(nullptr);
  }
  const auto [loss, tokens] = total(sums);
  result.tokens = tokens;
  result.scale = tokens > 0 ? 1.0 / tokens : 0.0;
  result.loss = loss * result.scale;
  timers.enter(Phase::optimizer);
  double squares = norm_->sum_of_squares(buffers_);
  store_->sum_over_owners(std::span(&squares, 1));
  result.norm = std::sqrt(squares) * result.scale;
  return result;
}

// The same batch once more, from the same parameters: a sound machine gives the same bits.
void Loop::compute_again(const Computed& first, StepTimers& timers, std::vector<Anomaly>& events) {
  const Computed again = compute(nullptr, timers);
  const auto verdicts = comm::gather_texts(world_, first.fingerprint == again.fingerprint ? "" : "x");
  std::string ranks;
  for (size_t r = 0; r < verdicts.size(); ++r)
    if (!verdicts[r].empty()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  const std::string step = std::to_string(state_.step + 1);
  Anomaly event{"rerun", "", {{"loss", first.loss}, {"loss_again", again.loss}}, {}};
  if (config_.resilience.rerun_mode == config::RerunMode::report_stats) {
    event.numbers.insert(event.numbers.end(), {{"grad_norm", first.norm},
                                               {"grad_norm_again", again.norm},
                                               {"loss_difference", again.loss - first.loss},
                                               {"grad_norm_difference", again.norm - first.norm}});
  }
  if (ranks.empty()) {
    event.text =
        "step " + step + " computed again gave the same bits: the data or the model, not the machine";
    event.texts.push_back({"verdict", "data"});
    events.push_back(std::move(event));
    return;
  }
  event.text = "step " + step + " computed again gave other bits on rank " + ranks + ": the machine";
  event.texts.insert(event.texts.end(), {{"verdict", "machine"}, {"ranks", ranks}});
  failure_anomalies_ = events;
  failure_anomalies_.push_back(event);
  fail(ErrorCode::rank_failure,
       event.text + "; parameters and optimizer are those of step " + std::to_string(state_.step),
       "resume the run on another machine: this machine's results cannot be trusted");
}

// Where a value that is not finite begins: the micro-batches run once more under a watch. Collective.
Anomaly Loop::locate(const Computed& computed) {
  const auto name_of = [](const Parameter* parameter) {
    return parameter ? parameter->name() : std::string();
  };
  // Each rank looks at what it holds; the first in a stage's backward pass is the last of its list.
  const Parameter* bad = first_bad_gradient(*store_);
  const auto last =
      static_cast<int>(comm::all_reduce(data_parallel(), bad ? bad->index() : -1, comm::ReduceOp::max));
  const std::string gradient = last < 0 ? "" : model_->parameters()[static_cast<size_t>(last)]->name();
  std::string mine, parameter = name_of(first_bad_parameter(*store_));
  FiniteCheck check;
  TapeObserver* const before = std::exchange(observer_, &check);
  StepTimers timers;
  forward_backward(nullptr, timers);
  if (!check.found().empty())
    mine = check.found() + " in micro-batch " + std::to_string(check.micro_batch() + 1) + " of " +
           std::to_string(batch_.size());
  observer_ = before;
  store_->finish_gradients();  // what was started must end
  const auto places = comm::gather_texts(world_, mine);
  const auto parameters = comm::gather_texts(world_, parameter);
  const auto gradients = comm::gather_texts(world_, gradient);
  Anomaly event{"not_finite", "", {{"loss", computed.loss}, {"grad_norm", computed.norm}}, {}};
  const auto say = [&](const char* key, const std::string& value, const std::string& text) {
    event.texts.push_back({key, value});
    event.text += (event.text.empty() ? "" : "; ") + text;
  };
  for (size_t r = 0; r < parameters.size(); ++r)
    if (!parameters[r].empty()) {
      say("parameter", parameters[r],
          "parameter `" + parameters[r] + "` itself is not finite" +
              (parameters.size() > 1 ? " on rank " + std::to_string(r) : ""));
      break;
    }
  for (size_t r = 0; r < places.size(); ++r)
    if (!places[r].empty()) {
      say("operation", places[r],
          "first in " + places[r] + (places.size() > 1 ? ", rank " + std::to_string(r) : ""));
      break;
    }
  for (const std::string& found : gradients)
    if (!found.empty()) {
      say("gradient", found, "first gradient: `" + found + "`");
      break;
    }
  if (event.text.empty()) event.text = "every operation's output is finite when it runs again";
  return event;
}

double Loop::parameter_norm() {
  double squares = norm_->sum_of_squares(buffers_, &optim::FlatBuffer::main);
  store_->sum_over_owners(std::span(&squares, 1));
  return std::sqrt(squares);
}

void Loop::pass_over_batch() {
  const int64_t batch = *config_.train.global_batch_size;
  ++state_.step;
  state_.consumed_samples += batch;
  state_.consumed_tokens += batch * config_.model.seq_length;
}

StepResult Loop::step(data::Loader& loader, StepTimers& timers) {
  StepResult result;
  failure_anomalies_.clear();
  const Computed computed = compute(&loader, timers);
  result.loss = computed.loss;
  result.gradient_norm = computed.norm;
  result.loss_tokens = static_cast<int64_t>(computed.tokens);
  result.learning_rate = schedule_.learning_rate(state_.schedule_samples);
  if (config_.logger.log_num_zeros_in_grad) {
    auto zeros = static_cast<double>(optim::count_zeros(buffers_));
    store_->sum_over_owners(std::span(&zeros, 1));
    result.num_zeros = static_cast<int64_t>(zeros);
  }

  const bool bad = config_.resilience.check_for_nan &&
                   !(std::isfinite(result.loss) && std::isfinite(result.gradient_norm));
  AnomalyDecision decision = detect_anomalies(config_.resilience, state_, result.loss, result.gradient_norm);
  result.events = std::move(decision.events);
  if (config_.resilience.rerun_mode != config::RerunMode::disabled && (bad || !result.events.empty()))
    compute_again(computed, timers, result.events);
  if (bad) {
    const Anomaly place = locate(computed);
    failure_anomalies_ = result.events;
    failure_anomalies_.push_back(place);
    fail(ErrorCode::failed,
         "step " + std::to_string(state_.step + 1) + ": the " +
             (std::isfinite(result.loss) ? "gradient norm" : "loss") + " is " +
             to_text(std::isfinite(result.loss) ? result.gradient_norm : result.loss) + " (" + place.text +
             "); parameters and optimizer are those of step " + std::to_string(state_.step),
         "a lower optimizer.lr, a longer warm-up or another precision; resilience.check_for_nan=false goes "
         "on regardless");
  }
  if (decision.action == config::SpikeAction::rewind) {
    result.rewind = true;
    return result;
  }
  result.skipped = decision.action == config::SpikeAction::skip ||
                   (config_.optimizer.grad_norm_skip_threshold &&
                    result.gradient_norm > *config_.optimizer.grad_norm_skip_threshold);
  if (!result.skipped) {
    optim::StepOptions step;
    step.lr = result.learning_rate;
    step.decoupled_lr = decoupled_schedule_.learning_rate(state_.schedule_samples);
    step.weight_decay = schedule_.weight_decay(state_.schedule_samples);
    step.gradient_scale = static_cast<float>(
        computed.scale * optim::clip_factor(result.gradient_norm, config_.optimizer.clip_grad));
    optimizer_->step(step);
    store_->after_update();
    state_.schedule_samples +=
        *config_.train.global_batch_size;  // skipped updates do not consume the schedule
    remember(config_.resilience, state_, result.loss, result.gradient_norm);
  }
  if (config_.logger.log_params_norm) result.params_norm = parameter_norm();
  pass_over_batch();
  timers.enter(Phase::other);
  return result;
}

double Loop::evaluate(std::shared_ptr<const data::Dataset> dataset, int64_t batches) {
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
  const auto sums = runner_->evaluate(
      micro_batches, [&](int64_t) -> const data::MicroBatch& { return micro = loader.next(); });
  const auto [loss, tokens] = total(sums);
  return tokens > 0 ? loss / tokens : 0.0;
}

}  // namespace capstan::train
