// The gradients of a FlatStore: when a bucket is reduced over ranks, and in which steps.
#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "kernels/table.hpp"
#include "parallel/flat_store.hpp"
#include "tensor/launch.hpp"

namespace capstan::parallel {

// Purpose of the transfers of a bucket's gradients.
static std::string gradients_of_bucket(size_t index) {
  return "gradients of bucket " + std::to_string(index);
}

Tensor FlatStore::gradient(const Parameter& parameter) {
  CAPSTAN_ASSERT(is_trainable(parameter), "a gradient of `" + parameter.name() + "`, which is frozen");
  Bucket& bucket = bucket_of(parameter);
  CAPSTAN_ASSERT(!bucket.reduced, "a gradient of `" + parameter.name() + "` after its bucket was reduced");
  if (!bucket.gradients.defined()) {
    // A bucket has one buffer: that of an earlier micro-batch is reduced first.
    const auto pends = [&](const PendingReduction& pending) { return &buckets_[pending.bucket] == &bucket; };
    while (std::ranges::any_of(pending_reductions_, pends)) finish_oldest_reduction();
    CategoryScope scope(MemoryCategory::gradients);
    bucket.gradients = Tensor::zeros(device_, {bucket.plan->elements});
  }
  Tensor gradient = view(bucket.gradients, parameter);
  if (std::exchange(unwritten_[static_cast<size_t>(parameter.index())], char{0}) != 0)
    launch(device_, device_.table().elementwise->fill, gradient, 0.0f, gradient.elements());
  return gradient;
}

Tensor FlatStore::gradient_for_write(const Parameter& parameter, bool& uninitialized) {
  uninitialized = std::exchange(unwritten_[static_cast<size_t>(parameter.index())], char{0}) != 0;
  return gradient(parameter);
}

void FlatStore::zero_gradients(int64_t step) {
  begin_step(static_cast<int>(parameters_.size()));
  if (low_precision_)
    low_precision_->begin_step(step, [this](const Parameter& parameter) {
      return bucket_of(parameter).plan->codes ? owned_values(parameter) : Tensor();
    });
  finish_reductions();
  for (size_t index = 0; index < buckets_.size(); ++index) {
    Bucket& bucket = buckets_[index];
    if (!bucket.plan->trainable) continue;
    finish_gradient_all_gather(index);
    bucket.reduced = bucket.summed = false;
    bucket.waiting = static_cast<int>(bucket.plan->parameters.size());
    if (has_wgrad_buffer(bucket))
      bucket.gradients = Tensor();
    else
      for (const Parameter* parameter : bucket.plan->parameters)
        unwritten_[static_cast<size_t>(parameter->index())] = 1;
  }
}

// With has_wgrad_buffer(): when the tape has computed the last weight gradient of all parameters of a bucket,
// starts to reduce them over the ranks (sharded gradients), or adds them to the sum. Gradients that another
// tape has already accumulated in the bucket are included.
void FlatStore::tape_gradient_done(const Parameter& parameter, const PendingUses& left) {
  const size_t index = layout_.positions[static_cast<size_t>(parameter.index())].bucket;
  if (!has_wgrad_buffer(buckets_[index])) return;
  for (const Parameter* other : buckets_[index].plan->parameters) {
    const auto i = static_cast<size_t>(other->index());
    if (i < left.size() && left[i] > 0) return;
  }
  if (!buckets_[index].gradients.defined()) return;
  if (buckets_[index].grid->shards_gradients)
    start_reduce(index);
  else
    add_micro_batch(buckets_[index]);
}

void FlatStore::gradient_ready(const Parameter& parameter) {
  const size_t index = layout_.positions[static_cast<size_t>(parameter.index())].bucket;
  Bucket& bucket = buckets_[index];
  if (--bucket.waiting > 0 || !options_.overlap_grad_reduce) return;
  if (!bucket.grid->shards_gradients) return start_reduce(index);
  // tape_gradient_done() has just started the reduction of the last micro-batch over `shard`.
  if (pending_reductions_.empty()) return;
  PendingReduction& newest = pending_reductions_.back();
  if (newest.bucket == index && !newest.complete) newest.last = true;
}

void FlatStore::cast(const Tensor& from, const Tensor& to, Queue queue) {
  launch(device_, queue, device_.table().elementwise->cast, from, to, from.elements());
}
void FlatStore::follow_compute() {
  if (reduce_queue_ != Queue::compute) device_.wait_for(reduce_queue_, *device_.record(Queue::compute));
}
Tensor FlatStore::reduce_buffer(PendingReduction& pending, int64_t elements, DType type) {
  CategoryScope scope(MemoryCategory::workspace);
  Tensor buffer = Tensor::empty(device_, {elements}, type);
  // The memory may have been used by earlier work of the compute queue.
  follow_compute();
  if (reduce_queue_ != Queue::compute) pending.buffers.push_back(buffer);
  return buffer;
}
void FlatStore::add_reduction(PendingReduction& pending, comm::Reduction reduction) {
  if (reduce_queue_ == Queue::compute) return reduction.finish();
  reduction.start_sum();
  pending.reductions.push_back(std::move(reduction));
}

// Limits the buffers of pending reductions, and adds a new one.
FlatStore::PendingReduction& FlatStore::add_pending(size_t index) {
  const size_t most = reduce_queue_ == Queue::compute ? 1 : kPendingReductions;
  while (pending_reductions_.size() >= most) finish_oldest_reduction();
  PendingReduction& pending = pending_reductions_.emplace_back();
  pending.bucket = index;
  return pending;
}

void FlatStore::add_micro_batch(Bucket& bucket) {
  const Tensor gradients = std::exchange(bucket.gradients, Tensor());
  if (!std::exchange(bucket.summed, true)) return cast(gradients, bucket.sum, Queue::compute);
  launch(device_, device_.table().elementwise->add, bucket.sum, gradients, bucket.sum, gradients.elements());
}

void FlatStore::complete_sum(Bucket& bucket) {
  if (!has_wgrad_buffer(bucket)) {
    // gradient() zeroes gradients that are still uninitialized.
    for (const Parameter* parameter : bucket.plan->parameters) gradient(*parameter);
    return;
  }
  if (bucket.gradients.defined()) add_micro_batch(bucket);
  if (!std::exchange(bucket.summed, true))
    launch(device_, device_.table().elementwise->fill, bucket.sum, 0.0f, bucket.sum.elements());
}

void FlatStore::start_reduce(size_t index) {
  PendingReduction& pending = add_pending(index);
  Bucket& bucket = buckets_[index];
  const GridSharding& grid = *bucket.grid;
  if (!grid.shards_gradients) complete_sum(bucket);
  pending.gradients = grid.shards_gradients ? std::exchange(bucket.gradients, Tensor()) : bucket.sum;
  if (watch_) watch_(pending.gradients);
  all_reduce_ranges(grid.groups.tensor, pending, bucket.partial);
  all_reduce_ranges(groups_.kv_replicas, pending, bucket.replicated);
  if (!grid.shards_gradients) bucket.reduced = true;
  if (grid.shards > 1) start_reduce_scatter(pending);
  // After the transfer of this bucket, so that it waits for none of these sums.
  for (PendingReduction& earlier : pending_reductions_)
    if (&earlier != &pending) start_sums(earlier);
  if (grid.shards > 1)
    trace_start("reduce bucket " + std::to_string(index), sent_over_shard(bucket, pending.in_flight.bytes()));
  const bool done = reduce_queue_ == Queue::compute && grid.shards == 1;
  if (!options_.overlap_grad_reduce || done) finish_oldest_reduction();
}

void FlatStore::start_reduce_scatter(PendingReduction& pending) {
  pending.in_flight = pending.gradients;
  if (const DType sent = sent_type(pending.gradients); sent != pending.gradients.dtype()) {
    pending.in_flight = reduce_buffer(pending, pending.gradients.elements(), sent);
    cast(pending.gradients, pending.in_flight, reduce_queue_);
  }
  const Bucket& bucket = buckets_[pending.bucket];
  const FlatRange mine = slice_of(bucket);
  pending.sum = pending.in_flight.flat_range(mine.begin, mine.count, {mine.count});
  // Without earlier work on the reduce queue, the bucket only waits for the compute queue.
  const Queue written_on = pending.buffers.empty() ? Queue::compute : reduce_queue_;
  pending.over_shard.emplace(comm::Reduction::reduce_scatter(*bucket.grid->groups.shard, pending.in_flight,
                                                             pending.sum, gradients_of_bucket(pending.bucket),
                                                             reduce_queue_, written_on));
}

// Queues all that remains of the reduction on the communication queue.
void FlatStore::start_sums(PendingReduction& pending) {
  if (reduce_queue_ == Queue::compute || pending.complete) return;
  if (pending.over_shard) pending.over_shard->start_sum();
  add_sum(pending);
  finish_bucket(pending);
  pending.complete = device_.record(reduce_queue_);
}

void FlatStore::add_sum(const PendingReduction& pending) {
  if (!pending.over_shard) return;
  const Queue queue = reduce_queue_;
  Bucket& bucket = buckets_[pending.bucket];
  const bool sharded = bucket.grid->shards_gradients;
  const FlatRange mine = slice_of(bucket);
  const Tensor slice = pending.gradients.flat_range(mine.begin, mine.count, {mine.count});
  if (sharded && !std::exchange(bucket.summed, true)) return cast(pending.sum, bucket.sum, queue);
  if (pending.sum.dtype() != slice.dtype()) cast(pending.sum, slice, queue);
  if (sharded)
    launch(device_, queue, device_.table().elementwise->add, bucket.sum, slice, bucket.sum, mine.count);
}

void FlatStore::finish_oldest_reduction() {
  PendingReduction& pending = pending_reductions_.front();
  start_sums(pending);
  std::optional<TraceScope> traced;
  if (pending.over_shard) traced.emplace(trace_wait("reduce bucket " + std::to_string(pending.bucket)));
  for (comm::Reduction& reduction : pending.reductions) reduction.finish();
  if (pending.over_shard) pending.over_shard->finish();
  if (pending.complete)
    device_.wait_for(Queue::compute, *pending.complete);
  else
    add_sum(pending);
  if (traced) traced->end();
  if (!pending.complete) finish_bucket(pending);
  pending_reductions_.pop_front();
}
FlatStore::~FlatStore() {
  // An error may have left the last pending reduction without its event `complete`.
  if (!pending_reductions_.empty() && reduce_queue_ != Queue::compute)
    device_.wait_for(Queue::compute, *device_.record(reduce_queue_));
}
void FlatStore::finish_reductions() {
  while (!pending_reductions_.empty()) finish_oldest_reduction();
}

// After the last sum over `shard` of a step: reduces this rank's slice over `replica`, and without sharding
// starts the all-gather of the slices.
void FlatStore::finish_bucket(PendingReduction& pending) {
  Bucket& bucket = buckets_[pending.bucket];
  const GridSharding& grid = *bucket.grid;
  if (grid.shards_gradients && !pending.last) return;
  bucket.reduced = true;
  const FlatRange mine = slice_of(bucket);
  if (grid.replicas > 1)
    sum_over_replicas(pending, grid.shards_gradients
                                   ? bucket.sum
                                   : bucket.sum.flat_range(mine.begin, mine.count, {mine.count}));
  if (!grid.shards_state && grid.shards > 1) start_gradient_all_gather(pending.bucket);
}

void FlatStore::sum_over_replicas(PendingReduction& pending, const Tensor& slice) {
  const Queue queue = reduce_queue_;
  Tensor in_flight = slice;
  const DType sent = sent_type(slice);
  if (sent != slice.dtype()) {
    in_flight = reduce_buffer(pending, slice.elements(), sent);
    cast(slice, in_flight, queue);
  }
  const GridSharding& grid = *buckets_[pending.bucket].grid;
  comm::Communicator& group = *grid.groups.replica;
  const int64_t n = in_flight.elements() / group.size();
  add_reduction(
      pending,
      grid.shards_over_replicas
          ? comm::Reduction::reduce_scatter(group, in_flight, in_flight.flat_range(group.rank() * n, n, {n}),
                                            gradients_of_bucket(pending.bucket), queue, queue)
          : comm::Reduction::all_reduce(group, in_flight, gradients_of_bucket(pending.bucket), queue, queue));
  if (sent != slice.dtype()) cast(in_flight, slice, queue);
}

void FlatStore::start_gradient_all_gather(size_t index) {
  Bucket& bucket = buckets_[index];
  const FlatRange mine = slice_of(bucket);
  bucket.in_flight = bucket.sum;
  if (const DType sent = sent_type(bucket.sum); sent != bucket.sum.dtype()) {
    CategoryScope scope(MemoryCategory::workspace);
    bucket.in_flight = Tensor::empty(device_, bucket.sum.shape(), sent);
    follow_compute();
    cast(bucket.sum.flat_range(mine.begin, mine.count, {mine.count}),
         bucket.in_flight.flat_range(mine.begin, mine.count, {mine.count}), reduce_queue_);
  }
  bucket.gradient_gather = bucket.grid->groups.shard->channel().start(
      comm::TransferBatch(gradients_of_bucket(index))
          .all_gather(bucket.in_flight.flat_range(mine.begin, mine.count, {mine.count}), bucket.in_flight),
      reduce_queue_);
  trace_start("all_gather gradients, bucket " + std::to_string(index),
              sent_over_shard(bucket, bucket.in_flight.bytes()));
}

void FlatStore::finish_gradient_all_gather(size_t index) {
  Bucket& bucket = buckets_[index];
  if (!bucket.gradient_gather) return;
  TraceScope traced = trace_wait("all_gather gradients, bucket " + std::to_string(index));
  if (bucket.in_flight.dtype() != bucket.sum.dtype()) {
    bucket.gradient_gather->wait(reduce_queue_);
    cast(bucket.in_flight, bucket.sum, reduce_queue_);
    if (reduce_queue_ != Queue::compute) device_.wait_for(Queue::compute, *device_.record(reduce_queue_));
  }
  bucket.gradient_gather->wait();
  bucket.gradient_gather.reset();
  traced.end();
  bucket.in_flight = Tensor();
}

void FlatStore::finish_gradients() {
  for (size_t index = 0; index < buckets_.size(); ++index) {
    // The all-gather of a bucket whose parameters were not used in this step is still pending.
    finish_gather(index);
    const Bucket& bucket = buckets_[index];
    if (bucket.plan->trainable &&
        (bucket.grid->shards_gradients ? bucket.gradients.defined() : !bucket.reduced))
      start_reduce(index);
  }
  start_pending_sums();
  reduce_over_replicas();
  reduce_tied();
  finish_reductions();
  for (size_t index = 0; index < buckets_.size(); ++index)
    if (buckets_[index].plan->trainable) finish_gradient_all_gather(index);
}

void FlatStore::start_pending_sums() {
  if (reduce_queue_ == Queue::compute) return finish_reductions();
  for (PendingReduction& pending : pending_reductions_) start_sums(pending);
}

void FlatStore::end_reduction(PendingReduction& pending) {
  if (reduce_queue_ == Queue::compute)
    pending_reductions_.pop_back();
  else
    pending.complete = device_.record(reduce_queue_);
}

// Sharded gradients: zeroes those of buckets that no micro-batch has reduced, and reduces over `replica` what
// is left; with overlap_grad_reduce the buckets whose parameters no micro-batch has used.
void FlatStore::reduce_over_replicas() {
  for (size_t index = 0; index < buckets_.size(); ++index) {
    Bucket& bucket = buckets_[index];
    if (!bucket.plan->trainable || !bucket.grid->shards_gradients) continue;
    if (!std::exchange(bucket.summed, true))
      launch(device_, device_.table().elementwise->fill, bucket.sum, 0.0f, bucket.sum.elements());
    if (bucket.grid->replicas == 1 || bucket.reduced) continue;
    PendingReduction& pending = add_pending(index);
    sum_over_replicas(pending, bucket.sum);
    end_reduction(pending);
  }
}

void FlatStore::reduce_tied() {
  for (size_t index = 0; index < buckets_.size(); ++index) {
    const Bucket& bucket = buckets_[index];
    const ParamSpec& spec = bucket.plan->parameters.front()->spec();
    comm::Communicator* holders = groups_.holders(spec);
    if (!bucket.plan->trainable || spec.tied == ParamSpec::Tied::no || comm::ranks_of(holders) == 1) continue;
    finish_gradient_all_gather(index);
    PendingReduction& pending = add_pending(index);
    // Pipeline stages number their buckets independently: the purpose names no bucket.
    add_reduction(pending,
                  comm::Reduction::all_reduce(*holders, gradients_of(bucket, bucket.owned),
                                              "gradients of tied weights", reduce_queue_, reduce_queue_));
    end_reduction(pending);
  }
}

// All-reduces the elements of all ranges over a group, in one reduction of a contiguous copy.
void FlatStore::all_reduce_ranges(comm::Communicator* group, PendingReduction& pending,
                                  const std::vector<FlatRange>& ranges) {
  if (comm::ranks_of(group) == 1 || ranges.empty()) return;
  const Queue queue = reduce_queue_;
  int64_t total = 0;
  for (const FlatRange& range : ranges) total += range.count;
  const int64_t padded = round_up(total, group->size());
  const Tensor together = reduce_buffer(pending, padded, DType::f32);
  const auto copy = [&](bool back) {
    int64_t at = 0;
    for (const FlatRange& range : ranges) {
      const Tensor there = pending.gradients.flat_range(range.begin, range.count, {range.count}),
                   here = together.flat_range(at, range.count, {range.count});
      cast(back ? here : there, back ? there : here, queue);
      at += range.count;
    }
  };
  copy(false);
  if (padded > total)
    launch(device_, queue, device_.table().elementwise->fill,
           together.flat_range(total, padded - total, {padded - total}), 0.0f, padded - total);
  add_reduction(pending, comm::Reduction::all_reduce(*group, together, gradients_of_bucket(pending.bucket),
                                                     queue, queue));
  copy(true);
}

void FlatStore::all_reduce_statistics(const Tensor& values, ParameterGrid grid) {
  const GridSharding& sharding = sharding_of(grid);
  const GridGroups& groups = sharding.groups;
  constexpr std::string_view kStatistics = "statistics of a step";
  if (sharding.shards_state) comm::all_reduce_numbers(*groups.shard, values, kStatistics);
  if (sharding.shards_over_replicas) comm::all_reduce_numbers(*groups.replica, values, kStatistics);
  if (groups.model) comm::all_reduce_numbers(*groups.model, values, kStatistics);
}

}  // namespace capstan::parallel
