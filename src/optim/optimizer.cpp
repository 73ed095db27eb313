#include "optim/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::optim {

namespace {

std::vector<Tensor> zero_state(Device& device, const std::vector<FlatBuffer>& buffers) {
  CategoryScope scope(MemoryCategory::moments);
  std::vector<Tensor> state;
  for (const FlatBuffer& buffer : buffers) state.push_back(Tensor::zeros(device, buffer.main.shape()));
  return state;
}

Tensor part(const Tensor& flat, const FlatBuffer::Range& range) {
  return flat.defined() ? flat.flat_range(range.begin, range.count, {range.count}) : Tensor();
}

float rate(const StepOptions& options, const FlatBuffer::Range& range) {
  return static_cast<float>((range.decoupled_lr ? options.decoupled_lr : options.lr) * range.lr_factor);
}

class Adam final : public Optimizer {
 public:
  Adam(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : device_(device), buffers_(std::move(buffers)) {
    constants_.beta1 = static_cast<float>(config.adam_beta1);
    constants_.beta2 = static_cast<float>(config.adam_beta2);
    constants_.eps = static_cast<float>(config.adam_eps);
    constants_.decoupled = config.decoupled_weight_decay;
    beta1_ = config.adam_beta1, beta2_ = config.adam_beta2;
    state_ = {{"exp_avg", zero_state(device, buffers_)}, {"exp_avg_sq", zero_state(device, buffers_)}};
  }
  void step(const StepOptions& options) override {
    ++steps_;
    kernels::AdamStep step = constants_;
    step.bias_correction1 = static_cast<float>(1.0 - std::pow(beta1_, static_cast<double>(steps_)));
    step.bias_correction2 = static_cast<float>(1.0 - std::pow(beta2_, static_cast<double>(steps_)));
    for (size_t b = 0; b < buffers_.size(); ++b) {
      const FlatBuffer& buffer = buffers_[b];
      for (const FlatBuffer::Range& range : buffer.ranges) {
        step.lr = rate(options, range);
        step.weight_decay = range.weight_decay ? static_cast<float>(options.weight_decay) : 0.0f;
        launch(device_, device_.table().optimizers->adam, step, part(buffer.gradients, range),
               options.gradient_scale, part(buffer.main, range), part(state_[0].buffers[b], range),
               part(state_[1].buffers[b], range), part(buffer.model, range), range.count);
      }
    }
  }
  const std::vector<State>& state() const override { return state_; }

 private:
  Device& device_;
  std::vector<FlatBuffer> buffers_;
  kernels::AdamStep constants_;
  double beta1_, beta2_;
  std::vector<State> state_;
};

class Sgd final : public Optimizer {
 public:
  Sgd(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : device_(device), buffers_(std::move(buffers)) {
    momentum_ = static_cast<float>(config.sgd_momentum);
    decoupled_ = config.decoupled_weight_decay;
    state_ = {{"momentum_buffer", zero_state(device, buffers_)}};
  }
  void step(const StepOptions& options) override {
    ++steps_;
    for (size_t b = 0; b < buffers_.size(); ++b) {
      const FlatBuffer& buffer = buffers_[b];
      for (const FlatBuffer::Range& range : buffer.ranges) {
        const float lr = rate(options, range);
        const float decay = range.weight_decay ? static_cast<float>(options.weight_decay) : 0.0f;
        const Tensor main = part(buffer.main, range);
        // Decoupled: w (1 - lr decay) - lr update. Else the kernel adds decay * w to the gradient.
        if (decoupled_ && decay != 0)
          launch(device_, device_.table().elementwise->scale, main, 1.0f - lr * decay, range.count);
        launch(device_, device_.table().optimizers->sgd, lr, momentum_, false, decoupled_ ? 0.0f : decay,
               part(buffer.gradients, range), options.gradient_scale, main, part(state_[0].buffers[b], range),
               part(buffer.model, range), range.count);
      }
    }
  }
  const std::vector<State>& state() const override { return state_; }

 private:
  Device& device_;
  std::vector<FlatBuffer> buffers_;
  float momentum_ = 0;
  bool decoupled_ = true;
  std::vector<State> state_;
};

}  // namespace

std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers) {
  switch (config.optimizer) {
    case config::OptimizerKind::adam:
      return std::make_unique<Adam>(config, device, std::move(buffers));
    case config::OptimizerKind::sgd:
      return std::make_unique<Sgd>(config, device, std::move(buffers));
    case config::OptimizerKind::lion:
    case config::OptimizerKind::muon:
      break;
  }
  fail(ErrorCode::unsupported, "optimizer.optimizer: this build trains with adam and sgd",
       "optimizer.optimizer=adam");
}

GradientNorm::GradientNorm(Device& device) {
  CategoryScope scope(MemoryCategory::workspace);
  result_ = Tensor::zeros(device, {1}, DType::f64);
}

double GradientNorm::sum_of_squares(const std::vector<FlatBuffer>& buffers, Tensor FlatBuffer::*which) {
  Device& device = result_.device();
  if (device.is_meta()) return 1.0;
  bool first = true;
  for (const FlatBuffer& buffer : buffers)
    for (const FlatBuffer::Range& range : buffer.ranges) {
      if (!range.counted) continue;
      launch(device, device.table().elementwise->sum_of_squares, part(buffer.*which, range), range.count,
             result_, !first);
      first = false;
    }
  return first ? 0.0 : result_.to_host<double>()[0];
}

int64_t count_zeros(const std::vector<FlatBuffer>& buffers) {
  constexpr int64_t kAtOnce = 1 << 20;
  int64_t zeros = 0;
  for (const FlatBuffer& buffer : buffers)
    for (const FlatBuffer::Range& range : buffer.ranges) {
      if (!range.counted || buffer.gradients.device().is_meta()) continue;
      for (int64_t at = 0; at < range.count; at += kAtOnce) {
        const int64_t count = std::min(kAtOnce, range.count - at);
        const auto values = buffer.gradients.flat_range(range.begin + at, count, {count}).to_host<float>();
        zeros += std::count(values.begin(), values.end(), 0.0f);
      }
    }
  return zeros;
}

double clip_factor(double norm, double clip) {
  return clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1.0;
}

}  // namespace capstan::optim
