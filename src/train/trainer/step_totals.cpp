#include "train/trainer/step_totals.hpp"

#include <cstddef>

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
                       const optim::Optimizer& optimizer)
    : mesh_(mesh), device_(device), store_(store) {
  static_assert(offsetof(StepValues, loss_tokens) == offsetof(StepValues, loss_sum) + sizeof(double));
  CategoryScope scope(MemoryCategory::workspace);
  values_ = Tensor::zeros(device, {sizeof(StepValues)}, DType::u8);
  losses_ = field(offsetof(StepValues, loss_sum), 2, DType::f64);
  gradient_squares_ = field(offsetof(StepValues, gradient_squares), 1, DType::f64);
  zero_gradients_ = field(offsetof(StepValues, zero_gradients), 1, DType::i64);
  parameter_squares_ = field(offsetof(StepValues, parameter_squares), 1, DType::f64);
  fingerprint_ = field(offsetof(StepValues, fingerprint), 1, DType::i64);
  control_ = field(offsetof(StepValues, control), sizeof(kernels::StepControl), DType::u8);
  for (const optim::FlatBuffer& buffer : optimizer.buffers())
    (buffer.host ? on_host_ : on_device_).push_back(buffer);
  gradients_ = on_host_.empty() ? on_device_ : with_range_tables(device, store.gradient_buffers());
  if (!on_host_.empty()) host_squares_ = Tensor::empty(*on_host_[0].host, {1}, DType::f64);
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
  comm::all_reduce_numbers(mesh_.group("dp-cp"), losses_);
  comm::all_reduce_numbers(mesh_.group("pp"), losses_);
}

void StepTotals::sum_gradients(bool count_zeros) {
  optim::sum_of_squares(gradients_, gradient_squares_);
  store_.all_reduce_statistics(gradient_squares_);
  if (!count_zeros) return;
  optim::count_zeros(gradients_, zero_gradients_);
  store_.all_reduce_statistics(zero_gradients_);
}

void StepTotals::decide(const kernels::StepLimits& limits) {
  launch(device_, device_.table().step_control->control, limits, values_);
}

void StepTotals::sum_parameters() {
  CategoryScope scope(MemoryCategory::workspace);
  if (host_squares_.defined()) {
    HostDevice& host = *on_host_[0].host;
    optim::sum_of_squares(on_host_, host_squares_, &optim::FlatBuffer::main);
    host.start_upload(host_squares_, parameter_squares_, "sum over main parameters");
    host.finish_uploads();
  }
  optim::sum_of_squares(on_device_, parameter_squares_, &optim::FlatBuffer::main, host_squares_.defined());
  store_.all_reduce_statistics(parameter_squares_);
}

StepValues StepTotals::read() const {
  StepValues values;
  values_.copy_to_host_bytes(DType::u8, std::as_writable_bytes(std::span(&values, 1)));
  return values;
}

}  // namespace capstan::train
