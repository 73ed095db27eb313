#include "optim/optimizer.hpp"

#include <cmath>

#include "base/error.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::optim {

std::vector<FlatBuffer> with_range_tables(Device& device, std::vector<FlatBuffer> buffers) {
  CategoryScope scope(MemoryCategory::workspace);
  for (FlatBuffer& buffer : buffers) {
    std::vector<kernels::UpdateRange> table;
    for (const FlatBuffer::Range& range : buffer.ranges)
      table.push_back({.begin = range.begin,
                       .count = range.count,
                       .lr_factor = range.lr_factor,
                       .decoupled_lr = range.decoupled_lr,
                       .weight_decay = range.weight_decay,
                       .counted = range.counted});
    const auto bytes = std::as_bytes(std::span(table));
    buffer.table = Tensor::empty(device, {static_cast<int64_t>(bytes.size())}, DType::u8);
    buffer.table.copy_from_host_bytes(bytes);
  }
  return buffers;
}

namespace {

int64_t range_count(const FlatBuffer& buffer) {
  return static_cast<int64_t>(buffer.ranges.size());
}

class Adam final : public Optimizer {
 public:
  Adam(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : Optimizer(config, device, std::move(buffers), {"exp_avg", "exp_avg_sq"}) {}

 private:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const auto t = static_cast<double>(steps_);
    const kernels::AdamStep step{
        .scale = scale,
        .beta1 = static_cast<float>(config_.adam_beta1),
        .beta2 = static_cast<float>(config_.adam_beta2),
        .eps = static_cast<float>(config_.adam_eps),
        .bias_correction1 = static_cast<float>(1.0 - std::pow(config_.adam_beta1, t)),
        .bias_correction2 = static_cast<float>(1.0 - std::pow(config_.adam_beta2, t))};
    const FlatBuffer& buffer = buffers_[b];
    launch(device_, device_.table().optimizers->adam, step, control, buffer.table, range_count(buffer),
           buffer.gradients, buffer.main, state_[0].buffers[b], state_[1].buffers[b], buffer.model);
  }
};

class Sgd final : public Optimizer {
 public:
  Sgd(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : Optimizer(config, device, std::move(buffers), {"momentum_buffer"}) {}

 private:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const kernels::SgdStep step{.scale = scale, .momentum = static_cast<float>(config_.sgd_momentum)};
    const FlatBuffer& buffer = buffers_[b];
    launch(device_, device_.table().optimizers->sgd, step, control, buffer.table, range_count(buffer),
           buffer.gradients, buffer.main, state_[0].buffers[b], buffer.model);
  }
};

class Lion final : public Optimizer {
 public:
  Lion(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : Optimizer(config, device, std::move(buffers), {"exp_avg"}) {}

 private:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const kernels::LionStep step{.scale = scale,
                                 .beta1 = static_cast<float>(config_.lion_beta1),
                                 .beta2 = static_cast<float>(config_.lion_beta2)};
    const FlatBuffer& buffer = buffers_[b];
    launch(device_, device_.table().optimizers->lion, step, control, buffer.table, range_count(buffer),
           buffer.gradients, buffer.main, state_[0].buffers[b], buffer.model);
  }
};

}  // namespace

Optimizer::Optimizer(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers,
                     std::initializer_list<const char*> state_names)
    : device_(device), config_(config), buffers_(with_range_tables(device, std::move(buffers))) {
  CategoryScope scope(MemoryCategory::moments);
  for (const char* name : state_names) {
    state_.push_back({name, {}});
    for (const FlatBuffer& buffer : buffers_)
      state_.back().buffers.push_back(Tensor::zeros(device, buffer.main.shape()));
  }
}

void Optimizer::step(const StepOptions& options, const Tensor& control) {
  ++steps_;
  const kernels::StepScale scale{.lr = options.lr,
                                 .decoupled_lr = options.decoupled_lr,
                                 .weight_decay = static_cast<float>(options.weight_decay),
                                 .decoupled_decay = config_.decoupled_weight_decay};
  for (size_t b = 0; b < buffers_.size(); ++b)
    if (!buffers_[b].ranges.empty()) update(b, scale, control);
}

std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers) {
  switch (config.optimizer) {
    case config::OptimizerKind::adam:
      return std::make_unique<Adam>(config, device, std::move(buffers));
    case config::OptimizerKind::sgd:
      return std::make_unique<Sgd>(config, device, std::move(buffers));
    case config::OptimizerKind::lion:
      return std::make_unique<Lion>(config, device, std::move(buffers));
    case config::OptimizerKind::muon:
      break;
  }
  fail(ErrorCode::unsupported, "optimizer.optimizer: this build trains with adam, lion and sgd",
       "optimizer.optimizer=adam");
}

void sum_of_squares(const std::vector<FlatBuffer>& buffers, const Tensor& sum, Tensor FlatBuffer::*which) {
  Device& device = sum.device();
  if (buffers.empty()) device.zero(sum.address(), sum.bytes());
  for (const FlatBuffer& buffer : buffers)
    launch(device, device.table().optimizers->sum_of_squares, buffer.table, range_count(buffer),
           buffer.*which, sum, &buffer != buffers.data());
}

void count_zeros(const std::vector<FlatBuffer>& buffers, const Tensor& count) {
  Device& device = count.device();
  if (buffers.empty()) device.zero(count.address(), count.bytes());
  for (const FlatBuffer& buffer : buffers)
    launch(device, device.table().optimizers->count_zeros, buffer.table, range_count(buffer),
           buffer.gradients, count, &buffer != buffers.data());
}

}  // namespace capstan::optim
