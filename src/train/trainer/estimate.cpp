#include "train/trainer/estimate.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "config/sections/batch_ramp.hpp"
#include "kernels/step_control.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/expert_bias.hpp"
#include "train/trainer/memory_trace.hpp"
#include "train/trainer/micro_batch_runner.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_totals.hpp"

namespace capstan::train {

namespace {

// Launches, copied bytes and sent bytes of a step, as counted by a device and the mesh.
struct StepCounts {
  std::map<std::string, int64_t> sent;  // bytes by group
  std::array<int64_t, kQueues> launches{};
  // Bytes from the host to the device, and back.
  int64_t copied_to_device = 0, copied_to_host = 0;

  // Applies `combine` to each count and that of `other`.
  template <class Combine>
  StepCounts with(const StepCounts& other, Combine combine) const {
    StepCounts result = *this;
    for (auto& [group, bytes] : result.sent) bytes = combine(bytes, other.sent.at(group));
    for (size_t i = 0; i < kQueues; ++i) result.launches[i] = combine(launches[i], other.launches[i]);
    result.copied_to_device = combine(copied_to_device, other.copied_to_device);
    result.copied_to_host = combine(copied_to_host, other.copied_to_host);
    return result;
  }
  StepCounts operator-(const StepCounts& other) const { return with(other, std::minus<int64_t>()); }
  StepCounts operator+(const StepCounts& other) const { return with(other, std::plus<int64_t>()); }
  StepCounts times(int64_t factor) const {
    return with(*this, [=](int64_t count, int64_t) { return count * factor; });
  }
};
StepCounts counts_of(const Device& device, const comm::Mesh& mesh) {
  StepCounts counts{.sent = sent_bytes(mesh)};
  for (size_t i = 0; i < kQueues; ++i) counts.launches[i] = device.launches(static_cast<Queue>(i));
  counts.copied_to_device = device.copied_bytes(Queue::host_to_device);
  counts.copied_to_host = device.copied_bytes(Queue::device_to_host);
  return counts;
}

// A micro-batch of zeros. documents, padding: includes the starts of documents, and which positions are
// padding, which need memory too.
data::MicroBatch shape_only(int64_t rows, int64_t seq, bool documents, bool padding) {
  data::MicroBatch shape = data::MicroBatch::zeros(rows, seq);
  shape.sample_ids.resize(static_cast<size_t>(rows));
  const auto end = static_cast<int32_t>(seq);
  shape.cu_seqlens.assign(static_cast<size_t>(rows),
                          documents ? std::vector<int32_t>{0, 0, end} : std::vector<int32_t>{0, end});
  if (padding) shape.lengths.assign(static_cast<size_t>(rows), end - 1);
  return shape;
}

// listener: of all memory; may be null.
std::unique_ptr<Device> meta_device(const config::Config& config, int local_ranks, MemoryListener* listener) {
  auto device = make_meta_device_for(config.train.device, config.train.threads.value_or(0), local_ranks);
  device->listen_to_memory(listener);
  return device;
}

// The objects of one rank's trainer on the `meta` device, and the operations of StepRunner::train_step() on
// them in the same order, without memory.
class MetaTrainer {
 public:
  MetaTrainer(const config::Config& config, Device& device, int64_t rank, Transport transport)
      : config_(config),
        device_(device),
        mesh_(mesh_sizes(config, config.dist.world_size), rank),
        model_((connect_meta(mesh_, transport), models::build(config.model, model_shard(config, mesh_)))),
        store_(device_, model_->parameters(), store_groups(mesh_),
               store_options(config, static_cast<int>(rank))),
        optimizer_(make_optimizer(config, device_, store_)),
        saved_(state_tensors(store_, config.checkpoint.save_optim ? optimizer_.get() : nullptr)),
        snapshot_(config.checkpoint.async_save && config.checkpoint.save_interval
                      ? snapshot_buffers(device_, saved_)
                      : std::vector<PinnedBuffer>()),
        runner_(config, mesh_, device_, *model_, store_),
        totals_(mesh_, device_, store_, *optimizer_, runner_.router_values(),
                config.model.mtp_num_layers.value_or(0)),
        expert_biases_(config, *model_, store_),
        micro_batches_(micro_batches_of(config, mesh_)) {
    if (reruns())
      store_.on_local_gradients([this](const Tensor& gradients) { totals_.add_to_fingerprint(gradients); });
    store_.after_load();
    // The losses live until the end of the step, also those of the micro-batches that are left out here.
    runner_.allocate_losses_of(micro_batches_);
  }

  StepCounts counts() const { return counts_of(device_, mesh_); }
  int64_t state_file_bytes() const { return store_.state_file() ? store_.state_file()->bytes() : 0; }
  // Number of micro-batches of a step.
  int64_t micro_batches() const { return micro_batches_; }

  // A step of `count` micro-batches.
  void step(int64_t count, TapeObserver* observer) {
    store_.zero_gradients();
    StepTimers timers;
    const auto losses =
        runner_.forward_backward(count, source_of(config_.train.micro_batch_size), timers, observer);
    store_.finish_gradients();
    if (reruns() && losses.sums.defined()) totals_.add_to_fingerprint(losses.sums);
    totals_.sum_losses(losses);
    totals_.sum_gradients(config_.logger.log_num_zeros_in_grad);
    totals_.decide({});
    optimizer_->step({}, totals_.control());
    expert_biases_.update(totals_.router_sums(), totals_.control());
    store_.after_update(totals_.control());
    if (config_.logger.log_params_norm) totals_.sum_parameters();
  }

  // Bytes that the host reads at the end of a step.
  int64_t bytes_read_by_host() const {
    return static_cast<int64_t>(sizeof(kernels::StepValues)) + runner_.router_values() * size_of(DType::f32) +
           config_.model.mtp_num_layers.value_or(0) * size_of(DType::f64);
  }
  // Buffers of a complete step and of evaluations.
  void reserve_uploads() {
    runner_.reserve_uploads(source_of(config_.train.micro_batch_size)(0), micro_batches_, true);
    const config::ValidationConfig& validation = config_.validation;
    if (!validation.eval_interval) return;
    const int64_t rows = validation.eval_micro_batch_size.value_or(config_.train.micro_batch_size);
    const int64_t evaluated =
        validation.eval_iters * config::eval_batch_size(config_) / (rows * mesh_.size(comm::Axis::dp));
    // An evaluation with at most as many rows needs less memory than a training step.
    if (rows > config_.train.micro_batch_size) runner_.forward_only(1, source_of(rows));
    runner_.reserve_uploads(source_of(rows)(0), evaluated, false);
  }
  // The synchronous save at the end of every run.
  void save() { state_reader(device_, saved_); }

 private:
  bool reruns() const { return config_.resilience.rerun_mode != config::RerunMode::disabled; }
  MicroBatchRunner::Source source_of(int64_t rows) const {
    const bool samples = config_.dataset.kind == config::DatasetKind::sft;
    const bool documents = samples || config_.dataset.reset_attention_mask;
    return [batch = shape_only(rows, config_.model.seq_length, documents, samples)](
               int64_t) -> const data::MicroBatch& { return batch; };
  }

  const config::Config& config_;
  Device& device_;
  comm::Mesh mesh_;
  const std::unique_ptr<models::Model> model_;
  parallel::FlatStore store_;
  const std::unique_ptr<optim::Optimizer> optimizer_;
  const std::vector<StateTensor> saved_;
  const std::vector<PinnedBuffer> snapshot_;
  MicroBatchRunner runner_;
  StepTotals totals_;
  ExpertBiases expert_biases_;
  const int64_t micro_batches_;
};

}  // namespace

int64_t StepEstimate::launches() const {
  return std::accumulate(launches_by_queue.begin(), launches_by_queue.end(), int64_t{0});
}

MemoryUse with_resident_data(MemoryUse use, int64_t bytes) {
  use.now += bytes, use.peak += bytes, use.reserved += bytes;
  use.now_by_category[static_cast<size_t>(MemoryCategory::data)] += bytes;
  use.peak_by_category[static_cast<size_t>(MemoryCategory::data)] += bytes;
  return use;
}

namespace {

// A rank's steps on the meta device, with the micro-batches of `part`.
class RecordedSteps final : public TapeObserver {
 public:
  RecordedSteps(const config::Config& config, int64_t rank, int local_ranks, Transport transport,
                const parallel::PipelineShape& shape, int64_t pipeline_rank,
                const parallel::ShorterStep& part)
      : part_(part),
        trace_(actions_of(shape, pipeline_rank, part), part),
        device_(meta_device(config, local_ranks, &trace_)),
        trainer_(config, *device_, rank, transport) {
    // The next step begins with what the first one leaves, such as a block of parameters that was gathered.
    step();
    flops_ = executed_flops_ = 0;
    const StepCounts before = trainer_.counts();
    step();
    counts_ = trainer_.counts() - before + period_counts_.times(part.times);
    trainer_.reserve_uploads();
    trainer_.save();
  }

  bool complete() const { return trace_.repeats(); }
  // With memory of complete steps.
  void write(const config::Config& config, int local_ranks, StepEstimate& estimate) const {
    const std::unique_ptr<Device> device = meta_device(config, local_ranks, nullptr);
    trace_.replay(*device);
    estimate.memory = device->memory();
    estimate.host_memory = device->memory(MemoryKind::host);
    estimate.state_file = trainer_.state_file_bytes();
    estimate.sent = counts_.sent;
    estimate.launches_by_queue = counts_.launches;
    estimate.copied_to_device = counts_.copied_to_device;
    // The host reads these values once, in StepTotals::read().
    estimate.copied_to_host = counts_.copied_to_host + trainer_.bytes_read_by_host();
    estimate.flops = flops_ / static_cast<double>(part_.micro_batches);
    estimate.executed_flops = executed_flops_ / static_cast<double>(part_.micro_batches);
  }

 private:
  static std::vector<parallel::PipelineAction> actions_of(parallel::PipelineShape shape, int64_t rank,
                                                          const parallel::ShorterStep& part) {
    shape.micro_batches = part.micro_batches;
    return make_actions(shape, rank);
  }
  void observe(const TapeEvent& event) override {
    executed_flops_ += event.cost.flops;
    // FLOPs of the model, without recomputation.
    if (!event.recomputed) flops_ += event.cost.flops;
  }
  // Before each action.
  void micro_batch(int64_t) override {
    trace_.begin_action();
    const int64_t action = actions_++ - part_.begin;
    if (action == 0) period_counts_ = trainer_.counts();
    if (action == part_.length) period_counts_ = trainer_.counts() - period_counts_;
  }
  void step() {
    trace_.begin_step();
    actions_ = 0;
    trainer_.step(part_.micro_batches, this);
    trace_.end_step();
  }

  const parallel::ShorterStep part_;
  MemoryTrace trace_;
  const std::unique_ptr<Device> device_;
  MetaTrainer trainer_;
  double flops_ = 0, executed_flops_ = 0;
  int64_t actions_ = 0;
  StepCounts period_counts_, counts_;
};

}  // namespace

StepEstimate estimate_step(const config::Config& config, int64_t rank, int local_ranks, int64_t resident_data,
                           std::optional<Transport> transport, bool runs_all) {
  if (!transport) transport = planned_transport(config);
  StepEstimate estimate;
  estimate.transport = *transport;
  const comm::Mesh mesh(mesh_sizes(config, config.dist.world_size), rank);
  const parallel::PipelineShape shape = pipeline_shape(config, micro_batches_of(config, mesh));
  const int64_t pipeline_rank = mesh.index(comm::Axis::pp);
  for (int64_t more = 0;; more = 2 * more + 1) {
    const parallel::ShorterStep part = runs_all ? parallel::ShorterStep{.micro_batches = shape.micro_batches}
                                                : shorter_step(shape, pipeline_rank, more);
    const RecordedSteps steps(config, rank, local_ranks, *transport, shape, pipeline_rank, part);
    if (!steps.complete()) continue;
    steps.write(config, local_ranks, estimate);
    break;
  }
  estimate.resident_data = resident_data;
  MemoryUse& host =
      backend_of(config.train.device).shares_host_memory ? estimate.memory : estimate.host_memory;
  host = with_resident_data(host, resident_data);
  return estimate;
}

void run_meta_step(const config::Config& config, Device& device, int64_t rank) {
  CAPSTAN_ASSERT(device.is_meta(), "a step without data on a device with values");
  MetaTrainer trainer(config, device, rank, planned_transport(config));
  const parallel::PipelineShape shape = pipeline_shape(config, 0);
  trainer.step(std::min(trainer.micro_batches(), 2 * std::max(shape.ranks, shape.group)), nullptr);
}

}  // namespace capstan::train
