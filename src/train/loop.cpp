#include "train/loop.hpp"

#include <array>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "nn/initialise.hpp"

namespace capstan::train {

namespace {
comm::MeshSizes mesh_sizes(const config::DistConfig& d, int64_t world) {
  return {.world = world,
          .tp = d.tensor_model_parallel_size,
          .cp = d.context_parallel_size,
          .pp = d.pipeline_model_parallel_size,
          .ep = d.expert_model_parallel_size,
          .etp = d.expert_tensor_parallel_size.value_or(d.tensor_model_parallel_size),
          .pp_before_dp = d.use_tp_pp_dp_mapping};
}
}  // namespace

Loop::Loop(const config::Config& config, comm::World& world)
    : config_(config),
      mesh_(mesh_sizes(config.dist, world.size()), world.rank()),
      device_(make_device(config.train.device, config.train.threads.value_or(0), world.local_size())),
      model_(models::build(config.model)),
      schedule_(make_schedule(config, false)),
      decoupled_schedule_(make_schedule(config, config.optimizer.decoupled_lr.has_value())) {
  mesh_.connect(world.communicator());
  parallel::FlatStore::Options options;
  options.compute = compute_type(config.mixed_precision);
  options.decay_qk_norm = config.optimizer.apply_wd_to_qk_layernorm;
  if (config.ddp.bucket_size) options.bucket_elements = *config.ddp.bucket_size;
  store_ = std::make_unique<parallel::FlatStore>(*device_, model_->parameters(), data_parallel(), options);
  buffers_ = store_->flat_buffers();
  optimizer_ = optim::build(config.optimizer, *device_, buffers_);
  norm_ = std::make_unique<optim::GradientNorm>(*device_);
  {
    OwnerScope scope(MemoryOwner::workspace);
    one_ = Tensor::from_host<float>(*device_, {1}, std::vector<float>{1.0f});
  }
  micro_batches_ =
      *config.train.global_batch_size / (config.train.micro_batch_size * mesh_.size(comm::Axis::dp));
  dropout_ = config.model.hidden_dropout > 0 || config.model.attention_dropout > 0;
}

void Loop::initialise() {
  for (const auto& parameter : model_->parameters()) {
    const Tensor main = store_->main(*parameter);
    std::vector<float> values(static_cast<size_t>(main.elements()));
    nn::initialise(parameter->spec(), static_cast<uint64_t>(config_.rng.seed),
                   nn::Rectangle::whole(main.shape()), values, *device_->context().pool);
    main.copy_from_host_bytes(std::as_bytes(std::span(values)));
  }
  store_->refresh_model();
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

void Loop::forward_backward(const data::MicroBatch& micro, StepTimers* timers, Sums& sums) {
  const bool training = timers != nullptr;
  const auto batch = upload(*device_, micro, training && dropout_);
  StepContext context{*device_, *store_, training ? observer_ : nullptr};
  Tape tape(context, training ? Tape::Mode::train : Tape::Mode::inference);
  models::ForwardOptions options;
  options.training = training;
  options.seed = static_cast<uint64_t>(config_.rng.seed);
  const auto loss = model_->forward(tape, batch, options);
  if (training) {
    timers->enter(Phase::backward);
    tape.backward({{"loss", one_}});
  }
  sums.losses.push_back(loss.exact_sum);
  for (const float weight : micro.loss_mask) sums.tokens += static_cast<double>(weight);
}

std::array<double, 2> Loop::total(const Sums& sums) {
  // Read only now: until here the host did not wait for the device.
  std::array<double, 2> result{0.0, sums.tokens};
  for (const Tensor& loss : sums.losses) result[0] += loss.to_host<double>()[0];
  comm::all_reduce(data_parallel(), result);
  return result;
}

StepResult Loop::step(data::Loader& loader, StepTimers& timers) {
  StepResult result;
  timers.enter(Phase::other);
  store_->zero_gradients();
  store_->begin_step(static_cast<int>(model_->parameters().size()));
  Sums sums;
  for (int64_t m = 0; m < micro_batches_; ++m) {
    timers.enter(Phase::data);
    const data::MicroBatch micro = loader.next();
    timers.enter(Phase::forward);
    if (m + 1 == micro_batches_) store_->begin_last_micro_batch();
    forward_backward(micro, &timers, sums);
  }

  timers.enter(Phase::reduce);
  store_->reduce_gradients();
  const auto [loss, tokens] = total(sums);
  const double scale = tokens > 0 ? 1.0 / tokens : 0.0;
  result.loss = loss * scale;
  result.loss_tokens = static_cast<int64_t>(tokens);

  timers.enter(Phase::optimizer);
  result.gradient_norm = std::sqrt(norm_->sum_of_squares(buffers_)) * scale;
  result.learning_rate = schedule_.learning_rate(state_.schedule_samples);
  if (config_.resilience.check_for_nan &&
      !(std::isfinite(result.loss) && std::isfinite(result.gradient_norm)))
    fail(ErrorCode::failed,
         "step " + std::to_string(state_.step + 1) + ": the " +
             (std::isfinite(result.loss) ? "gradient norm" : "loss") + " is " +
             to_text(std::isfinite(result.loss) ? result.gradient_norm : result.loss) +
             "; parameters and optimizer are those of step " + std::to_string(state_.step),
         "a lower optimizer.lr, a longer warm-up or another precision; resilience.check_for_nan=false goes "
         "on regardless");
  result.skipped = config_.optimizer.grad_norm_skip_threshold &&
                   result.gradient_norm > *config_.optimizer.grad_norm_skip_threshold;
  const int64_t batch = *config_.train.global_batch_size;
  if (!result.skipped) {
    optim::StepOptions step;
    step.lr = result.learning_rate;
    step.decoupled_lr = decoupled_schedule_.learning_rate(state_.schedule_samples);
    step.weight_decay = schedule_.weight_decay(state_.schedule_samples);
    step.gradient_scale =
        static_cast<float>(scale * optim::clip_factor(result.gradient_norm, config_.optimizer.clip_grad));
    optimizer_->step(step);
    state_.schedule_samples += batch;  // skipped updates do not consume the schedule
  }
  ++state_.step;
  state_.consumed_samples += batch;
  state_.consumed_tokens += batch * config_.model.seq_length;
  timers.enter(Phase::other);
  return result;
}

double Loop::evaluate(std::shared_ptr<const data::GptDataset> dataset, int64_t batches) {
  data::LoaderOptions options = loader_options();
  options.consumed_samples = 0;
  options.micro_batch_size =
      config_.validation.eval_micro_batch_size.value_or(config_.train.micro_batch_size);
  options.global_batch_size =
      config_.validation.eval_global_batch_size.value_or(*config_.train.global_batch_size);
  data::Loader loader(std::move(dataset), options);
  const int64_t micro_batches =
      batches * options.global_batch_size / (options.micro_batch_size * options.data_parallel_size);
  Sums sums;
  for (int64_t m = 0; m < micro_batches; ++m) forward_backward(loader.next(), nullptr, sums);
  const auto [loss, tokens] = total(sums);
  return tokens > 0 ? loss / tokens : 0.0;
}

}  // namespace capstan::train
