#include "train/trainer/estimate.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "kernels/step_control.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/anomaly.hpp"
#include "train/trainer/micro_batch_runner.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_totals.hpp"

namespace capstan::train {

namespace {

class CostSum final : public TapeObserver {
 public:
  void observe(const TapeEvent& event) override {
    executed += event.cost.flops;
    // FLOPs of the model, without recomputation.
    if (!event.recomputed) flops += event.cost.flops;
  }
  double flops = 0, executed = 0;
};

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
  StepCounts scaled(int64_t factor, int64_t divisor) const {
    return with(*this, [=](int64_t count, int64_t) { return count * factor / divisor; });
  }
};
StepCounts counts_of(const Device& device, const comm::Mesh& mesh) {
  StepCounts counts{.sent = sent_bytes(mesh)};
  for (size_t i = 0; i < kQueues; ++i) counts.launches[i] = device.launches(static_cast<Queue>(i));
  counts.copied_to_device = device.copied_bytes(Queue::host_to_device);
  counts.copied_to_host = device.copied_bytes(Queue::device_to_host);
  return counts;
}

// A micro-batch without contents. documents: with the starts of documents, which take memory too.
data::MicroBatch shape_only(int64_t rows, int64_t seq, bool documents) {
  data::MicroBatch shape = data::MicroBatch::zeros(rows, seq);
  shape.sample_ids.resize(static_cast<size_t>(rows));
  const auto end = static_cast<int32_t>(seq);
  shape.cu_seqlens.assign(static_cast<size_t>(rows),
                          documents ? std::vector<int32_t>{0, 0, end} : std::vector<int32_t>{0, end});
  return shape;
}

// Enough micro-batches to fill the pipeline; more of them need no more memory. GPipe holds all at once.
int64_t micro_batches_to_estimate(const parallel::PipelineShape& step) {
  if (step.ranks == 1) return std::min<int64_t>(step.micro_batches, 2);
  if (step.all_forward_first) return step.micro_batches;
  return std::min(step.micro_batches, 2 * std::max(step.ranks, step.group));
}

}  // namespace

int64_t StepEstimate::launches() const {
  return std::accumulate(launches_by_queue.begin(), launches_by_queue.end(), int64_t{0});
}

MemoryUse with_held_data(MemoryUse use, int64_t bytes) {
  use.now += bytes, use.peak += bytes, use.reserved += bytes;
  use.now_by_category[static_cast<size_t>(MemoryCategory::data)] += bytes;
  use.peak_by_category[static_cast<size_t>(MemoryCategory::data)] += bytes;
  return use;
}

StepEstimate estimate_step(const config::Config& config, int64_t rank, int local_ranks, int64_t held_data,
                           std::optional<Transport> transport) {
  if (!transport) transport = planned_transport(config);
  const auto device =
      make_meta_device_for(config.train.device, config.train.threads.value_or(0), local_ranks);
  comm::Mesh mesh(mesh_sizes(config, config.dist.world_size), rank);
  connect_meta(mesh, *transport);
  const auto model = models::build(config.model, model_shard(config, mesh));
  parallel::FlatStore store(*device, model->parameters(), store_groups(mesh),
                            store_options(config, *transport));
  const auto optimizer = make_optimizer(config, *device, store);
  const auto saved_tensors = state_tensors(store, config.checkpoint.save_optim ? optimizer.get() : nullptr);
  std::vector<PinnedBuffer> snapshot;
  if (config.checkpoint.async_save && config.checkpoint.save_interval)
    snapshot = snapshot_buffers(*device, saved_tensors);
  MicroBatchRunner runner(config, mesh, *device, *model, store);
  StepTotals totals(mesh, *device, store, *optimizer);
  std::optional<Fingerprint> fingerprint;
  // The copies of ChunkReader::read().
  const auto hash = [&](const Tensor& tensor) {
    if (fingerprint && !device->shares_host_memory())
      device->start_copy_to_host(nullptr, tensor.address(), tensor.bytes(), Queue::device_to_host);
  };
  if (config.resilience.rerun_mode != config::RerunMode::disabled) {
    fingerprint.emplace(*device);
    store.on_local_gradients(hash);
  }
  const auto source_of = [&](int64_t rows) {
    const bool documents =
        config.dataset.kind == config::DatasetKind::sft || config.dataset.reset_attention_mask;
    return [batch = shape_only(rows, config.model.seq_length, documents)](
               int64_t) -> const data::MicroBatch& { return batch; };
  };

  const int64_t all = micro_batches_of(config, mesh);
  const int64_t micro_batches = micro_batches_to_estimate(pipeline_shape(config, all));
  CostSum cost;
  StepTimers timers;
  const auto step = [&](int64_t count, TapeObserver* observer) {
    const StepCounts before = counts_of(*device, mesh);
    store.zero_gradients();
    // The losses live until the end of the step, also those of the micro-batches that are left out here.
    Tensor other_losses;
    if (count < all) {
      CategoryScope scope(MemoryCategory::workspace);
      other_losses = Tensor::empty(*device, {all - count}, DType::f64);
    }
    const auto losses =
        runner.forward_backward(count, source_of(config.train.micro_batch_size), timers, observer);
    store.finish_gradients();
    if (losses.sums.defined()) hash(losses.sums);
    totals.sum_losses(losses);
    totals.sum_gradients(config.logger.log_num_zeros_in_grad);
    totals.decide({});
    optimizer->step({}, totals.control());
    store.after_update(totals.control());
    if (config.logger.log_params_norm) totals.sum_parameters();
    return counts_of(*device, mesh) - before;
  };
  const int64_t more = std::min(all, 4 * micro_batches);
  store.after_load();
  // The next step begins with what the first one leaves, such as a block of parameters that was gathered.
  step(more, nullptr);
  StepCounts counts = step(micro_batches, &cost);
  // Every further micro-batch sends and copies the same number of bytes and launches the same kernels: two
  // counts are enough.
  if (more > micro_batches)
    counts = counts + (step(more, nullptr) - counts).scaled(all - micro_batches, more - micro_batches);
  runner.reserve_uploads(source_of(config.train.micro_batch_size)(0), all, true);
  const config::ValidationConfig& validation = config.validation;
  const int64_t eval_rows = validation.eval_micro_batch_size.value_or(config.train.micro_batch_size);
  const int64_t evaluated = validation.eval_iters *
                            validation.eval_global_batch_size.value_or(*config.train.global_batch_size) /
                            (eval_rows * mesh.size(comm::Axis::dp));
  if (validation.eval_interval) {
    // Otherwise a training step needs more memory.
    if (eval_rows > config.train.micro_batch_size) runner.forward_only(1, source_of(eval_rows));
    runner.reserve_uploads(source_of(eval_rows)(0), evaluated, false);
  }
  fingerprint.reset();
  store.on_local_gradients(nullptr);
  // Every run ends with a save that waits.
  state_reader(*device, saved_tensors);
  StepEstimate estimate;
  estimate.transport = *transport;
  estimate.sent = std::move(counts.sent);
  estimate.launches_by_queue = counts.launches;
  estimate.copied_to_device = counts.copied_to_device;
  // The host reads these values once, in StepTotals::read().
  estimate.copied_to_host = counts.copied_to_host + static_cast<int64_t>(sizeof(kernels::StepValues));
  estimate.flops = cost.flops / static_cast<double>(micro_batches);
  estimate.executed_flops = cost.executed / static_cast<double>(micro_batches);
  estimate.memory = device->memory();
  estimate.host_memory = device->memory(MemoryKind::host);
  estimate.held_data = held_data;
  MemoryUse& host =
      backend_of(config.train.device).shares_host_memory ? estimate.memory : estimate.host_memory;
  host = with_held_data(host, held_data);
  return estimate;
}

}  // namespace capstan::train
