#include "train/trainer/micro_batch_runner.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "config/sections/moe_layers.hpp"
#include "train/setup/model.hpp"
#include "train/setup/offload.hpp"

namespace capstan::train {

// The layers read later tokens, the head their labels.
static MtpInputs mtp_inputs(const config::ModelConfig& config, const models::Model& model) {
  int64_t depths = 0;
  for (const models::Stage& stage : model.stages())
    if (stage.mtp_layers > 0 || stage.head) depths = stage.states_out() - 1;
  if (depths == 0) return {};
  return {.depths = depths,
          .loss_factor = config.mtp_loss_scaling_factor / static_cast<double>(depths),
          .positions = config.position_embedding_type == config::PositionEmbedding::learned_absolute};
}

MicroBatchRunner::MicroBatchRunner(const config::Config& config, const comm::Mesh& mesh, Device& device,
                                   const models::Model& model, ParamStore& store)
    : config_(config),
      model_(model),
      store_(store),
      offload_(offloads_activations(config, device) ? std::make_unique<ActivationOffload>(device) : nullptr),
      context_{device, store, nullptr, offload_.get()},
      shape_(pipeline_shape(config, 0)),
      context_shard_{mesh.size(comm::Axis::cp), mesh.index(comm::Axis::cp)},
      uploader_(device, context_shard_),
      mtp_(mtp_inputs(config.model, model)) {
  CAPSTAN_ASSERT(shape_.chunks == static_cast<int64_t>(model.stages().size()),
                 "a model in " + std::to_string(model.stages().size()) + " chunks");
  links_ = parallel::pipeline_comm(mesh, tensor_parallel(config, mesh));
  links_.context = &context_;
  links_.overlap_p2p = config.comm_overlap.overlap_p2p_comm.value_or(true);
  dropout_ = config.model.hidden_dropout > 0 || config.model.attention_dropout > 0 ||
             (config.peft && config.peft->dropout > 0) ||
             (config.model.num_moe_experts && config.model.moe_input_jitter_eps);
  hidden_dtype_ = compute_type(config.mixed_precision);
  if (const auto layers = config::router_layers(config.model); !layers.empty()) {
    const auto losses = config::balance_losses(config.model);
    router_statistics_ = std::make_unique<nn::RouterStatistics>(
        device, layers, *config.model.num_moe_experts, std::ssize(losses),
        std::ranges::count(losses, config::RouterBalancing::global_aux_loss, &config::BalanceLoss::type) > 0);
  }
  CategoryScope scope(MemoryCategory::workspace);
  one_ = Tensor::from_host<float>(device, {1}, std::vector<float>{1.0f});
}

MicroBatchRunner::Losses MicroBatchRunner::forward_backward(int64_t micro_batches, const Source& source,
                                                            StepTimers& timers, TapeObserver* observer) {
  begin(micro_batches, source, &timers, observer);
  if (pipelined()) {
    if (std::exchange(scheduled_, micro_batches) != micro_batches)
      actions_ = make_actions(shape_, links_.rank);
    parallel::run_actions(shape_, actions_, links_, *this);
  } else {
    for (int64_t m = 0; m < micro_batches; ++m) {
      forward(m, 0, {});
      backward(m, 0, {});
    }
  }
  return std::move(losses_);
}

MicroBatchRunner::Losses MicroBatchRunner::forward_only(int64_t micro_batches, const Source& source) {
  begin(micro_batches, source, nullptr, nullptr);
  if (pipelined())
    parallel::run_actions(shape_, forward_actions(), links_, *this);
  else
    for (int64_t m = 0; m < micro_batches; ++m) forward(m, 0, {});
  return std::move(losses_);
}

void MicroBatchRunner::begin(int64_t micro_batches, const Source& source, StepTimers* timers,
                             TapeObserver* observer) {
  source_ = &source;
  timers_ = timers;
  context_.observer = observer;
  forwards_ = 0;
  rows_.clear();
  losses_ = {};
  losses_known_ = 0;
  if (model_.stages().back().head) {
    CategoryScope scope(MemoryCategory::workspace);
    const int64_t losses = std::max(micro_batches, least_losses_);
    losses_.sums = Tensor::empty(context_.device, {losses}, DType::f64);
    if (timers && mtp_.depths > 0)
      losses_.mtp_sums = Tensor::empty(context_.device, {losses, mtp_.depths}, DType::f64);
  }
  // An earlier call may have ended with an error.
  batches_.clear();
  tapes_.clear();
  if (router_statistics_ && timers) {
    router_statistics_->clear();
    losses_.routers = router_statistics_->sums();
  }
  shape_.micro_batches = micro_batches;
  uploader_.begin_step();
}

// Without a backward pass the last group of micro-batches may be smaller than the pipeline.
std::vector<parallel::PipelineAction> MicroBatchRunner::forward_actions() const {
  std::vector<parallel::PipelineAction> steps;
  for (int64_t first = 0; first < shape_.micro_batches; first += shape_.ranks)
    for (int64_t c = 0; c < shape_.chunks; ++c)
      for (int64_t m = first; m < std::min(first + shape_.ranks, shape_.micro_batches); ++m)
        steps.push_back({parallel::ActionKind::forward, static_cast<int32_t>(m), static_cast<int32_t>(c)});
  return steps;
}

std::string MicroBatchRunner::range_name(const char* pass, int64_t micro_batch, int64_t chunk) const {
  return std::string(pass) + " of micro-batch " + std::to_string(micro_batch) +
         (shape_.chunks > 1 ? ", chunk " + std::to_string(chunk) : "");
}

void MicroBatchRunner::load(int64_t micro_batch) {
  const int64_t last = std::min(micro_batch + 1, shape_.micro_batches - 1);
  for (auto next = static_cast<int64_t>(rows_.size()); next <= last; ++next) {
    enter(Phase::data);
    const data::MicroBatch& micro = (*source_)(next);
    const bool training = timers_ != nullptr;
    batches_.emplace(next, uploader_.start(micro, training && dropout_, training ? loss_scale_ : 1.0,
                                           training ? mtp_ : MtpInputs()));
    rows_.push_back(micro.rows * micro.sequence_length / context_shard_.ranks);
    if (model_.stages().back().head) losses_.tokens += loss_tokens(micro, context_shard_);
  }
}

Tensor MicroBatchRunner::make_input(const parallel::PipelineAction& action) {
  load(action.micro_batch);
  const int64_t ranks = links_.tensor.shards_rows() ? links_.tensor.size() : 1;
  const models::Stage& stage = model_.stages()[static_cast<size_t>(action.chunk)];
  int64_t states = action.kind == parallel::ActionKind::forward ? stage.states_in() : stage.states_out();
  // Evaluation is without multi-token prediction.
  if (!timers_) states = 1;
  const int64_t rows = states * rows_[static_cast<size_t>(action.micro_batch)] / ranks;
  return Tensor::empty(context_.device, {rows, model_.hidden()}, hidden_dtype_);
}

Tensor MicroBatchRunner::forward(int64_t micro_batch, int64_t chunk, const Tensor& hidden_states) {
  load(micro_batch);
  const RangeScope range(context_.device, [&] { return range_name("forward", micro_batch, chunk); });
  enter(Phase::forward);
  if (context_.observer) context_.observer->micro_batch(micro_batch);
  const bool training = timers_ != nullptr;
  if (++forwards_ == shape_.micro_batches * shape_.chunks && training) store_.begin_last_micro_batch();
  auto tape = std::make_unique<Tape>(context_, training ? Tape::Mode::train : Tape::Mode::inference);
  const Var input = hidden_states.defined() ? tape->input("hidden_states", hidden_states, training) : Var{};
  models::ForwardOptions options;
  options.training = training;
  options.seed = static_cast<uint64_t>(config_.rng.seed);
  if (training) options.router_statistics = router_statistics_.get();
  const auto output =
      model_.forward_stage(*tape, static_cast<size_t>(chunk), batches_.at(micro_batch).get(), input, options);
  if (output.loss.exact_sum.defined()) add_losses(output.loss);
  if (chunk + 1 == shape_.chunks) batches_.erase(micro_batch);
  // The next stage has them.
  if (training && output.hidden_states.value.defined()) tape->release_output("hidden_states");
  if (training) tapes_[{micro_batch, chunk}] = std::move(tape);
  if (shape_.ranks > 1) enter(Phase::pipeline);
  return output.hidden_states.value;
}

void MicroBatchRunner::add_losses(const models::Loss& loss) {
  const auto copy = [this](const Tensor& sum, const Tensor& to, int64_t index) {
    context_.device.copy(to.flat_range(index, 1, {1}).address(), sum.address(), sum.bytes());
  };
  int64_t index = losses_known_ * mtp_.depths;
  for (const Tensor& sum : loss.mtp_sums) copy(sum, losses_.mtp_sums, index++);
  copy(loss.exact_sum, losses_.sums, losses_known_++);
}

Tensor MicroBatchRunner::backward(int64_t micro_batch, int64_t chunk, const Tensor& gradient) {
  const RangeScope range(context_.device, [&] { return range_name("backward", micro_batch, chunk); });
  enter(Phase::backward);
  if (context_.observer) context_.observer->micro_batch(micro_batch);
  const auto found = tapes_.find({micro_batch, chunk});
  CAPSTAN_ASSERT(found != tapes_.end(), "a backward pass before its forward pass");
  Tape& tape = *found->second;
  const Tape::BackwardOptions options{.delay_weight_gradients = shape_.separates_weight_gradients()};
  const models::Stage& stage = model_.stages()[static_cast<size_t>(chunk)];
  std::map<std::string, Tensor> gradients;
  if (stage.head) {
    gradients.emplace("loss", one_);
    for (int64_t depth = 1; depth < stage.states_out(); ++depth)
      gradients.emplace(models::mtp_loss_name(static_cast<size_t>(depth)), one_);
  } else {
    gradients.emplace("hidden_states", gradient);
  }
  // Beside adapters of later layers, nothing is trained in a stage with the embedding.
  const bool trains = stage.head || tape.output("hidden_states").needs_gradient();
  if (trains) tape.backward(gradients, options);
  Tensor result = stage.embedding ? Tensor() : tape.take_input_gradient("hidden_states");
  // Until its weight gradients the tape holds their inputs only.
  if (!options.delay_weight_gradients) tapes_.erase(found);
  if (shape_.ranks > 1) enter(Phase::pipeline);
  return result;
}

void MicroBatchRunner::weight_gradients(int64_t micro_batch, int64_t chunk) {
  const RangeScope range(context_.device, [&] { return range_name("weight gradients", micro_batch, chunk); });
  enter(Phase::backward);
  if (context_.observer) context_.observer->micro_batch(micro_batch);
  const auto found = tapes_.find({micro_batch, chunk});
  CAPSTAN_ASSERT(found != tapes_.end(), "weight gradients before their backward pass");
  found->second->run_weight_gradients();
  tapes_.erase(found);
  if (shape_.ranks > 1) enter(Phase::pipeline);
}

}  // namespace capstan::train
