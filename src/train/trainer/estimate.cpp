#include "train/trainer/estimate.hpp"

#include <algorithm>

#include "kernels/table.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/micro_batch_runner.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_totals.hpp"

namespace capstan::train {

namespace {

class CostSum final : public TapeObserver {
 public:
  void observe(const TapeEvent& event) override {
    executed += event.cost.flops;
    // What the step needs, not what recomputation adds.
    if (!event.recomputed) flops += event.cost.flops;
  }
  double flops = 0, executed = 0;
};

// `documents`: attention keeps documents apart, whose starts take memory too.
data::MicroBatch shape_only(int64_t rows, int64_t seq, bool documents) {
  data::MicroBatch shape;
  shape.rows = rows;
  shape.sequence_length = seq;
  const auto n = static_cast<size_t>(rows * seq);
  shape.tokens.resize(n), shape.labels.resize(n), shape.loss_mask.resize(n), shape.position_ids.resize(n);
  shape.sample_ids.resize(static_cast<size_t>(rows));
  const auto end = static_cast<int32_t>(seq);
  shape.cu_seqlens.assign(static_cast<size_t>(rows),
                          documents ? std::vector<int32_t>{0, 0, end} : std::vector<int32_t>{0, end});
  return shape;
}

// Enough micro-batches to fill the pipeline: further ones need no further memory. GPipe holds all at once.
int64_t micro_batches_to_estimate(const parallel::PipelineShape& step) {
  if (step.ranks == 1) return std::min<int64_t>(step.micro_batches, 2);
  if (step.all_forward_first) return step.micro_batches;
  return std::min(step.micro_batches, 2 * std::max(step.ranks, step.group));
}

}  // namespace

StepEstimate estimate_step(const config::Config& config, int64_t rank, int local_ranks) {
  const auto device =
      make_meta_device(kernels::cpu_table(), threads_per_rank(config.train.threads.value_or(0), local_ranks));
  comm::Mesh mesh(mesh_sizes(config, config.dist.world_size), rank);
  mesh.connect_meta();
  const auto model = models::build(config.model, model_shard(config, mesh));
  parallel::FlatStore store(*device, model->parameters(), store_groups(mesh), store_options(config));
  const auto optimizer = optim::build(config.optimizer, *device, store.flat_buffers());
  std::vector<PinnedBuffer> snapshot;
  if (config.checkpoint.async_save && config.checkpoint.save_interval)
    snapshot = snapshot_buffers(
        *device, state_tensors(store, config.checkpoint.save_optim ? optimizer.get() : nullptr));
  MicroBatchRunner runner(config, mesh, *device, *model, store);
  StepTotals totals(mesh, *device, store, *optimizer);
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
  StepEstimate estimate;
  int64_t launched = 0;
  const auto step = [&](int64_t count, TapeObserver* observer) {
    const auto before = sent_bytes(mesh);
    const int64_t launches_before = device->launches();
    store.zero_gradients();
    // The losses live until the end of the step.
    const auto losses =
        runner.forward_backward(count, source_of(config.train.micro_batch_size), timers, observer);
    store.finish_gradients();
    totals.sum_losses(losses);
    totals.sum_gradients(config.logger.log_num_zeros_in_grad);
    totals.decide({});
    optimizer->step({}, totals.control());
    store.after_update();
    if (config.logger.log_params_norm) totals.sum_parameters();
    launched = device->launches() - launches_before;
    auto sent = sent_bytes(mesh);
    for (auto& [group, bytes] : sent) bytes -= before.at(group);
    return sent;
  };
  const int64_t more = std::min(all, 4 * micro_batches);
  store.after_load();
  // The next step begins with what the first one leaves, such as a block of parameters that was gathered.
  step(more, nullptr);
  estimate.sent = step(micro_batches, &cost);
  estimate.launches = launched;
  // Every further micro-batch sends the same number of bytes and launches the same kernels: two counts are
  // enough.
  if (more > micro_batches) {
    const auto at_step_of_all = [&](int64_t& value, int64_t with_more) {
      value += (with_more - value) * (all - micro_batches) / (more - micro_batches);
    };
    for (const auto& [group, bytes] : step(more, nullptr)) at_step_of_all(estimate.sent[group], bytes);
    at_step_of_all(estimate.launches, launched);
  }
  const int64_t eval_rows = config.validation.eval_micro_batch_size.value_or(0);
  if (config.validation.eval_interval && eval_rows > config.train.micro_batch_size)  // else a step needs more
    runner.forward_only(1, source_of(eval_rows));
  estimate.flops = cost.flops / static_cast<double>(micro_batches);
  estimate.executed_flops = cost.executed / static_cast<double>(micro_batches);
  estimate.memory = device->memory();
  return estimate;
}

}  // namespace capstan::train
