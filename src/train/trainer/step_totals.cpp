#include "train/trainer/step_totals.hpp"

#include <cstddef>
#include <cstring>
#include <utility>

#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::train {

using kernels::StepValues;

Tensor StepTotals::field(size_t offset, int64_t count, DType dtype) const {
  const int64_t bytes = count * size_of(dtype);
  return values_.flat_range(static_cast<int64_t>(offset), bytes, {bytes}).as_type(dtype);
}

StepTotals::StepTotals(const comm::Mesh& mesh, Device& device, parallel::FlatStore& store,
                       const optim::Optimizer& optimizer, int64_t router_values, int64_t mtp_depths)
    : mesh_(mesh), device_(device), store_(store) {
  static_assert(offsetof(StepValues, loss_tokens) == offsetof(StepValues, loss_sum) + sizeof(double));
  CategoryScope scope(MemoryCategory::workspace);
  const int64_t mtp_end = static_cast<int64_t>(sizeof(StepValues)) + mtp_depths * size_of(DType::f64);
  values_ = Tensor::zeros(device, {mtp_end + router_values * size_of(DType::f32)}, DType::u8);
  mtp_losses_ = field(sizeof(StepValues), mtp_depths, DType::f64);
  routers_ = field(static_cast<size_t>(mtp_end), router_values, DType::f32);
  losses_ = field(offsetof(StepValues, loss_sum), 2, DType::f64);
  gradient_squares_ = field(offsetof(StepValues, gradient_squares), 1, DType::f64);
  zero_gradients_ = field(offsetof(StepValues, zero_gradients), 1, DType::i64);
  parameter_squares_ = field(offsetof(StepValues, parameter_squares), 1, DType::f64);
  fingerprint_ = field(offsetof(StepValues, fingerprint), 1, DType::i64);
  control_ = field(offsetof(StepValues, control), sizeof(kernels::StepControl), DType::u8);
  bool offloaded = false;
  for (const optim::FlatBuffer& buffer : optimizer.buffers()) {
    Buffers& mine = buffers_of(buffer.grid);
    (buffer.host ? mine.on_host : mine.on_device).push_back(buffer);
    if (buffer.host) mine.host_squares = Tensor::empty(*buffer.host, {1}, DType::f64);
    offloaded = offloaded || buffer.host;
  }
  if (offloaded)
    for (optim::FlatBuffer& buffer : with_range_tables(device, store.gradient_buffers()))
      buffers_of(buffer.grid).gradients.push_back(std::move(buffer));
  else
    for (Buffers* mine : {&dense_, &expert_}) mine->gradients = mine->on_device;
  if (store.has_expert_grid()) grid_sums_ = Tensor::zeros(device, {2}, DType::f64);
}

void StepTotals::clear_fingerprint() {
  device_.zero(fingerprint_.address(), fingerprint_.bytes());
  fingerprinted_ = 0;
}

void StepTotals::add_to_fingerprint(const Tensor& tensor) {
  launch(device_, device_.table().step_control->add_fingerprint, tensor, tensor.bytes(), fingerprinted_++,
         fingerprint_);
}

void StepTotals::sum_losses(const MicroBatchRunner::Losses& losses) {
  launch(device_, device_.table().step_control->sum_losses, losses.sums,
         losses.sums.defined() ? losses.sums.elements() : 0, losses.tokens, losses_);
  comm::all_reduce_numbers(mesh_.group("dp-cp"), losses_, "losses");
  comm::all_reduce_numbers(mesh_.group("pp"), losses_, "losses");
  if (mtp_losses_.elements() > 0) sum_mtp_losses(losses.mtp_sums);
  if (!losses.routers.defined()) return;
  device_.copy(routers_.address(), losses.routers.address(), routers_.bytes());
  // Tensor-parallel ranks route different rows, or one of them counts.
  for (const char* group : {"dp-cp", "tp", "pp"})
    comm::all_reduce_sum_any(mesh_.group(group), routers_, "statistics of routers");
}

void StepTotals::sum_mtp_losses(const Tensor& sums) {
  if (sums.defined())
    launch(device_, device_.table().step_control->sum_ranks, sums, sums.size(0), mtp_losses_, sums.size(1));
  else
    device_.zero(mtp_losses_.address(), mtp_losses_.bytes());
  for (const char* group : {"dp-cp", "pp"})
    comm::all_reduce_numbers(mesh_.group(group), mtp_losses_, "losses of multi-token prediction");
}

void StepTotals::sum_over_grids(const Tensor& total,
                                const std::function<void(ParameterGrid, const Tensor&)>& sum) {
  if (!grid_sums_.defined()) {
    sum(ParameterGrid::dense, total);
    return store_.all_reduce_statistics(total, ParameterGrid::dense);
  }
  const Tensor parts = grid_sums_.as_type(total.dtype());
  for (const ParameterGrid grid : kParameterGrids) {
    const Tensor part = parts.flat_range(static_cast<int64_t>(grid), 1, {1});
    sum(grid, part);
    store_.all_reduce_statistics(part, grid);
  }
  launch(device_, device_.table().step_control->sum_ranks, parts, 2, total, 1);
}

void StepTotals::sum_gradients(bool count_zeros) {
  sum_over_grids(gradient_squares_, [&](ParameterGrid grid, const Tensor& sum) {
    optim::sum_of_squares(buffers_of(grid).gradients, sum);
  });
  if (!count_zeros) return;
  sum_over_grids(zero_gradients_, [&](ParameterGrid grid, const Tensor& count) {
    optim::count_zeros(buffers_of(grid).gradients, count);
  });
}

void StepTotals::decide(const kernels::StepLimits& limits) {
  launch(device_, device_.table().step_control->control, limits, values_);
}

void StepTotals::sum_parameters() {
  CategoryScope scope(MemoryCategory::workspace);
  sum_over_grids(parameter_squares_, [&](ParameterGrid grid, const Tensor& sum) {
    const Buffers& mine = buffers_of(grid);
    const bool offloaded = !mine.on_host.empty();
    if (offloaded) {
      HostDevice& host = *mine.on_host[0].host;
      optim::sum_of_squares(mine.on_host, mine.host_squares, &optim::FlatBuffer::main);
      host.start_upload(mine.host_squares, sum, "sum over main parameters");
      host.finish_uploads();
    }
    optim::sum_of_squares(mine.on_device, sum, &optim::FlatBuffer::main, offloaded);
  });
}

StepValues StepTotals::read() {
  std::vector<std::byte> bytes(static_cast<size_t>(values_.bytes()));
  values_.copy_to_host_bytes(DType::u8, bytes);
  StepValues values;
  std::memcpy(&values, bytes.data(), sizeof values);
  size_t at = sizeof values;
  const auto take = [&](auto& into, const Tensor& from) {
    into.resize(static_cast<size_t>(from.elements()));
    if (!into.empty()) std::memcpy(into.data(), bytes.data() + at, static_cast<size_t>(from.bytes()));
    at += static_cast<size_t>(from.bytes());
  };
  take(mtp_values_, mtp_losses_);
  take(router_values_, routers_);
  return values;
}

}  // namespace capstan::train
