// The gradients of a FlatStore: when a bucket is exchanged, and how its sums are made.
#include <utility>

#include "kernels/table.hpp"
#include "parallel/flat_store.hpp"
#include "tensor/launch.hpp"

namespace capstan::parallel {

Tensor FlatStore::gradient(const Parameter& parameter) {
  CAPSTAN_ASSERT(trains(parameter), "a gradient of `" + parameter.name() + "`, which does not train");
  Bucket& bucket = bucket_of(parameter);
  CAPSTAN_ASSERT(shards_gradients_ || !bucket.reduced,
                 "a gradient of `" + parameter.name() + "` after its bucket was exchanged");
  if (!bucket.gradients.defined()) {
    CategoryScope scope(MemoryCategory::gradients);
    bucket.gradients = Tensor::zeros(device_, {bucket.plan->elements});
  }
  Tensor gradient = view(bucket.gradients, parameter);
  if (std::exchange(unwritten_[static_cast<size_t>(parameter.index())], char{0}) != 0)
    launch(device_, device_.table().elementwise->fill, gradient, 0.0f, gradient.elements());
  return gradient;
}

Tensor FlatStore::gradient_to_set(const Parameter& parameter, bool& fresh) {
  fresh = std::exchange(unwritten_[static_cast<size_t>(parameter.index())], char{0}) != 0;
  return gradient(parameter);
}

void FlatStore::zero_gradients() {
  begin_step(static_cast<int>(parameters_.size()));
  finish_reductions();
  for (Bucket& bucket : buckets_) {
    if (!bucket.plan->trains) continue;
    finish_gradient_gather(bucket);
    bucket.reduced = false;
    bucket.waiting = static_cast<int>(bucket.plan->parameters.size());
    if (shards_gradients_)
      bucket.gradients = Tensor();
    else
      for (const Parameter* parameter : bucket.plan->parameters)
        unwritten_[static_cast<size_t>(parameter->index())] = 1;
  }
}

// Starts to reduce sharded gradients as soon as one tape has no more of a bucket's weight gradients to run.
// Sums that another tape has added already are reduced with them.
void FlatStore::tape_gradient_done(const Parameter& parameter, const PendingUses& left) {
  if (!shards_gradients_) return;
  const size_t index = layout_.positions[static_cast<size_t>(parameter.index())].bucket;
  for (const Parameter* other : buckets_[index].plan->parameters) {
    const auto i = static_cast<size_t>(other->index());
    if (i < left.size() && left[i] > 0) return;
  }
  if (buckets_[index].gradients.defined()) start_reduce(index);
}

void FlatStore::gradient_ready(const Parameter& parameter) {
  const size_t index = layout_.positions[static_cast<size_t>(parameter.index())].bucket;
  if (--buckets_[index].waiting == 0 && options_.overlap_grad_reduce && !shards_gradients_)
    start_reduce(index);
}

void FlatStore::cast(const Tensor& from, const Tensor& to, Queue queue) {
  launch(device_, queue, device_.table().elementwise->cast, from, to, from.elements());
}

// One exchange is under way at a time, or two on the communication queue: their memory is that of the
// buckets.
void FlatStore::start_reduce(size_t index) {
  const Queue queue = options_.reduce_queue;
  while (pending_reductions_.size() >= (queue == Queue::compute ? 1 : 2)) finish_reduce();
  Bucket& bucket = buckets_[index];
  // Zeroes those that were not set.
  if (!shards_gradients_)
    for (const Parameter* parameter : bucket.plan->parameters) gradient(*parameter);
  if (watch_) watch_(bucket.gradients);
  sum_ranges(groups_.tensor, bucket.gradients, bucket.partial);
  sum_ranges(groups_.kv_replicas, bucket.gradients, bucket.replicated);
  if (!shards_gradients_) bucket.reduced = true;
  if (shards_ == 1) {
    finish_bucket(bucket);
    return;
  }
  const Tensor gradients = bucket.gradients;
  if (shards_gradients_) bucket.gradients = Tensor();
  Tensor in_flight = gradients;
  if (options_.reduce != DType::f32) {
    CategoryScope scope(MemoryCategory::workspace);
    in_flight = Tensor::empty(device_, gradients.shape(), options_.reduce);
    if (queue != Queue::compute) device_.wait_for(queue, *device_.record(Queue::compute));
    cast(gradients, in_flight, queue);
  }
  const FlatRange mine = slice_of(*bucket.plan);
  const Tensor sum = in_flight.flat_range(mine.begin, mine.count, {mine.count});
  PendingReduction& pending = pending_reductions_.emplace_back(
      PendingReduction{index, gradients, in_flight, sum,
                       comm::Reduction::scatter(*groups_.shard, in_flight, sum, queue), nullptr});
  if (queue != Queue::compute) {
    add_sum(pending, queue);
    pending.added = device_.record(queue);
  }
  trace_start("reduce bucket " + std::to_string(index), in_flight.bytes());
  if (!options_.overlap_grad_reduce) finish_reduce();
}

void FlatStore::add_sum(const PendingReduction& pending, Queue queue) {
  Bucket& bucket = buckets_[pending.bucket];
  const FlatRange mine = slice_of(*bucket.plan);
  const Tensor slice = pending.gradients.flat_range(mine.begin, mine.count, {mine.count});
  if (shards_gradients_ && !std::exchange(bucket.reduced, true)) return cast(pending.sum, bucket.sum, queue);
  if (options_.reduce != DType::f32) cast(pending.sum, slice, queue);
  if (shards_gradients_)
    launch(device_, queue, device_.table().elementwise->add, bucket.sum, slice, bucket.sum, mine.count);
}

void FlatStore::finish_reduce() {
  PendingReduction& pending = pending_reductions_.front();
  TraceScope traced = trace_wait("reduce bucket " + std::to_string(pending.bucket));
  pending.reduction.finish();
  if (pending.added)
    device_.wait_for(Queue::compute, *pending.added);
  else
    add_sum(pending, Queue::compute);
  traced.end();
  Bucket& bucket = buckets_[pending.bucket];
  pending_reductions_.pop_front();
  if (!shards_gradients_) finish_bucket(bucket);
}
FlatStore::~FlatStore() {
  if (!pending_reductions_.empty() && pending_reductions_.back().added)
    device_.wait_for(Queue::compute, *pending_reductions_.back().added);
}
void FlatStore::finish_reductions() {
  while (!pending_reductions_.empty()) finish_reduce();
}

// Completes the sum of this rank's slice, which is that over `shard`, over replicas and tied copies.
void FlatStore::finish_bucket(Bucket& bucket) {
  const FlatRange mine = slice_of(*bucket.plan);
  if (replicas_ > 1)
    sum_over_replicas(shards_gradients_ ? bucket.sum
                                        : bucket.gradients.flat_range(mine.begin, mine.count, {mine.count}));
  if (!shards_state_ && shards_ > 1) start_gradient_gather(bucket);
}

void FlatStore::sum_over_replicas(const Tensor& slice) {
  Tensor in_flight = slice;
  if (options_.reduce != DType::f32) {
    CategoryScope scope(MemoryCategory::workspace);
    in_flight = Tensor::empty(device_, slice.shape(), options_.reduce);
    cast(slice, in_flight);
  }
  if (shards_over_replicas_)
    comm::reduce_scatter_sum(*groups_.replica, in_flight);
  else
    comm::all_reduce_sum(*groups_.replica, in_flight);
  if (options_.reduce != DType::f32) cast(in_flight, slice);
}

void FlatStore::start_gradient_gather(Bucket& bucket) {
  const FlatRange mine = slice_of(*bucket.plan);
  bucket.in_flight = bucket.gradients;
  if (options_.reduce != DType::f32) {
    CategoryScope scope(MemoryCategory::workspace);
    bucket.in_flight = Tensor::empty(device_, bucket.gradients.shape(), options_.reduce);
    cast(bucket.gradients.flat_range(mine.begin, mine.count, {mine.count}),
         bucket.in_flight.flat_range(mine.begin, mine.count, {mine.count}));
  }
  bucket.gradient_gather = groups_.shard->channel().start(comm::Batch().all_gather(
      bucket.in_flight.flat_range(mine.begin, mine.count, {mine.count}), bucket.in_flight));
  trace_start("gather gradients", bucket.in_flight.bytes());
}

void FlatStore::finish_gradient_gather(Bucket& bucket) {
  if (!bucket.gradient_gather) return;
  TraceScope traced = trace_wait("gather gradients");
  bucket.gradient_gather->wait();
  traced.end();
  bucket.gradient_gather.reset();
  if (options_.reduce != DType::f32) cast(bucket.in_flight, bucket.gradients);
  bucket.in_flight = Tensor();
}

void FlatStore::finish_gradients() {
  for (size_t index = 0; index < buckets_.size(); ++index) {
    // Of parameters that nothing has used.
    finish_gather(index);
    const Bucket& bucket = buckets_[index];
    if (bucket.plan->trains && (shards_gradients_ ? bucket.gradients.defined() : !bucket.reduced))
      start_reduce(index);
  }
  finish_reductions();
  for (Bucket& bucket : buckets_) {
    if (!bucket.plan->trains) continue;
    if (shards_gradients_) {
      if (!bucket.reduced)
        launch(device_, device_.table().elementwise->fill, bucket.sum, 0.0f, bucket.sum.elements());
      bucket.reduced = true;
      finish_bucket(bucket);
    }
    finish_gradient_gather(bucket);
  }
  if (ranks_of(groups_.embedding) > 1)
    for (const Bucket& bucket : buckets_)
      if (bucket.plan->trains && bucket.plan->parameters.front()->spec().tied != ParamSpec::Tied::no)
        comm::all_reduce_sum_any(*groups_.embedding, owned_gradients(bucket));
}

// One exchange for all the ranges.
void FlatStore::sum_ranges(comm::Communicator* group, const Tensor& flat,
                           const std::vector<FlatRange>& ranges) {
  if (ranks_of(group) == 1 || ranges.empty()) return;
  int64_t total = 0;
  for (const FlatRange& range : ranges) total += range.count;
  CategoryScope scope(MemoryCategory::workspace);
  const Tensor together = Tensor::empty(device_, {total});
  const auto copy = [&](bool back) {
    int64_t at = 0;
    for (const FlatRange& range : ranges) {
      const Tensor there = flat.flat_range(range.begin, range.count, {range.count}),
                   here = together.flat_range(at, range.count, {range.count});
      cast(back ? here : there, back ? there : here);
      at += range.count;
    }
  };
  copy(false);
  comm::all_reduce_sum_any(*group, together);
  copy(true);
}

void FlatStore::sum_over_owners(const Tensor& values) {
  if (shards_state_) comm::all_reduce_numbers(*groups_.shard, values);
  if (shards_over_replicas_) comm::all_reduce_numbers(*groups_.replica, values);
  if (groups_.model) comm::all_reduce_numbers(*groups_.model, values);
}

}  // namespace capstan::parallel
