#include "comm/reduce.hpp"

#include <algorithm>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::comm {

void all_reduce(Communicator& group, std::span<double> values, ReduceOp op) {
  if (group.is_single() || values.empty()) return;
  const auto size = static_cast<size_t>(group.size());
  std::vector<double> all(values.size() * size);
  group.all_gather(values.data(), all.data(), static_cast<int64_t>(values.size_bytes()));
  for (size_t i = 0; i < values.size(); ++i) {
    double result = all[i];
    for (size_t r = 1; r < size; ++r) {
      const double other = all[r * values.size() + i];
      result = op == ReduceOp::sum   ? result + other
               : op == ReduceOp::max ? std::max(result, other)
                                     : std::min(result, other);
    }
    values[i] = result;
  }
}
double all_reduce(Communicator& group, double value, ReduceOp op) {
  all_reduce(group, std::span(&value, 1), op);
  return value;
}

Reduction::Reduction(Communicator& group, const Tensor& values, const Tensor& sum, bool gather,
                     std::string_view purpose, Queue queue, Queue written_on)
    : group_(&group), queue_(queue), values_(values), sum_(sum), gather_(gather), purpose_(purpose) {
  CAPSTAN_ASSERT(values.is_contiguous() && values.elements() == sum.elements() * group.size() &&
                     values.dtype() == sum.dtype(),
                 "a sum of " + values.text() + " into " + sum.text());
  if (group.is_single()) return;
  Device& device = values.device();
  CategoryScope scope(MemoryCategory::workspace);
  received_ = Tensor::empty(device, values.shape(), values.dtype());
  // `received_` is memory of the compute queue until now.
  if (written_on != Queue::compute) device.wait_for(written_on, *device.record(Queue::compute));
  transfers_ = group.channel().start(TransferBatch(purpose_).all_to_all(values, received_), written_on);
}
Reduction Reduction::reduce_scatter(Communicator& group, const Tensor& values, const Tensor& sum,
                                    std::string_view purpose, Queue queue, Queue written_on) {
  return Reduction(group, values, sum, false, purpose, queue, written_on);
}
Reduction Reduction::all_reduce(Communicator& group, const Tensor& values, std::string_view purpose,
                                Queue queue, Queue written_on) {
  const int64_t n = values.elements() / group.size();
  return Reduction(group, values, values.flat_range(group.rank() * n, n, {n}), true, purpose, queue,
                   written_on);
}
void Reduction::add_parts() {
  Device& device = values_.device();
  const auto& table = *device.table().elementwise;
  transfers_.wait(queue_);
  if (group_->is_single() && queue_ != Queue::compute)
    device.wait_for(queue_, *device.record(Queue::compute));
  QueueScope traced(device, queue_);
  if (!group_->is_single())
    launch(device, queue_, table.sum_parts, received_, group_->size(), sum_, sum_.elements());
  else if (sum_.address() != values_.address())
    launch(device, queue_, table.cast, values_, sum_, sum_.elements());
  if (queue_ != Queue::compute)
    traced.end("sum of " + std::to_string(sum_.bytes()) + " bytes over `" + group_->name() + "`");
}
void Reduction::gather_slices() {
  if (!gather_ || group_->is_single()) return;
  gathered_ = group_->channel().start(TransferBatch(purpose_).all_gather(sum_, values_), queue_);
  gathered_.wait(queue_);
}
void Reduction::start_sum() {
  if (summed_ || !values_.defined()) return;
  add_parts();
  // The compute queue may use its memory again once the sum is queued there.
  if (queue_ == Queue::compute) received_ = Tensor();
  gather_slices();
  summed_ = values_.device().record(queue_);
}
void Reduction::finish() {
  if (!values_.defined()) return;
  start_sum();
  transfers_.wait();
  gathered_.wait();
  if (queue_ != Queue::compute) values_.device().wait_for(Queue::compute, *summed_);
  values_ = sum_ = received_ = Tensor();
}

void reduce_scatter_sum(Communicator& group, const Tensor& values, std::string_view purpose) {
  const int64_t n = values.elements() / group.size();
  Reduction::reduce_scatter(group, values, values.flat_range(group.rank() * n, n, {n}), purpose).finish();
}

PendingTransfers start_gather_slices(Communicator& group, const Tensor& values, std::string_view purpose) {
  if (group.is_single()) return {};
  CAPSTAN_ASSERT(values.is_contiguous() && values.elements() % group.size() == 0,
                 "all_gather of " + values.text());
  const int64_t n = values.elements() / group.size();
  return group.channel().start(
      TransferBatch(purpose).all_gather(values.flat_range(group.rank() * n, n, {n}), values));
}

void all_reduce_sum(Communicator& group, const Tensor& values, std::string_view purpose) {
  if (!group.is_single()) Reduction::all_reduce(group, values, purpose).finish();
}

void all_reduce_sum_any(Communicator& group, const Tensor& values, std::string_view purpose) {
  if (group.is_single() || values.elements() == 0) return;
  const int64_t padded = round_up(values.elements(), group.size());
  if (padded == values.elements()) return all_reduce_sum(group, values, purpose);
  CategoryScope scope(MemoryCategory::workspace);
  const Tensor wide = Tensor::zeros(values.device(), {padded}, values.dtype());
  const auto cast = values.device().table().elementwise->cast;
  launch(values.device(), cast, values, wide, values.elements());
  all_reduce_sum(group, wide, purpose);
  launch(values.device(), cast, wide, values, values.elements());
}

// Every rank's values, in rank order: [ranks x elements].
static Tensor gather_parts(Communicator& group, const Tensor& values, std::string_view purpose) {
  CategoryScope scope(MemoryCategory::workspace);
  Tensor all = Tensor::empty(values.device(), {group.size() * values.elements()}, values.dtype());
  group.channel().start(TransferBatch(purpose).all_gather(values, all)).wait();
  return all;
}

void all_reduce_max(Communicator& group, const Tensor& values, std::string_view purpose) {
  if (group.is_single() || values.elements() == 0) return;
  launch(values.device(), values.device().table().elementwise->max_parts,
         gather_parts(group, values, purpose), group.size(), values, values.elements());
}

void all_reduce_numbers(Communicator& group, const Tensor& values, std::string_view purpose) {
  if (group.is_single()) return;
  launch(values.device(), values.device().table().step_control->sum_ranks,
         gather_parts(group, values, purpose), group.size(), values, values.elements());
}

}  // namespace capstan::comm
