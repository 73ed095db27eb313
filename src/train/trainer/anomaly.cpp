#include "train/trainer/anomaly.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace capstan::train {

namespace {

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

std::optional<double> spike_limit(const config::ResilienceConfig& config, config::SpikeAction action,
                                  double factor, const std::vector<double>& recent) {
  if (action == config::SpikeAction::off) return std::nullopt;
  if (recent.size() < static_cast<size_t>(std::min<int64_t>(config.spike_window, 16))) return std::nullopt;
  return factor * mean_of(recent);
}

void detect_spike(std::optional<double> limit, config::SpikeAction action, double factor,
                  const std::vector<double>& recent, const char* event, const char* quantity, double value,
                  AnomalyDecision& result) {
  if (!limit || !std::isfinite(value) || value <= *limit) return;
  const double mean = mean_of(recent);
  result.anomalies.push_back({event,
                              std::string("the ") + quantity + " is " + significant(value, 4) +
                                  ", more than " + to_text(factor) + " times the mean " +
                                  significant(mean, 4) + " of the " + std::to_string(recent.size()) +
                                  " steps before",
                              std::string(config::enum_name(action)),
                              {{"value", value}, {"mean", mean}, {"factor", factor}},
                              {}});
  result.action = std::max(result.action, action);
}

void append_recent(std::vector<double>& recent, int64_t window, double value) {
  if (!std::isfinite(value)) return;
  recent.push_back(value);
  if (static_cast<int64_t>(recent.size()) > window)
    recent.erase(recent.begin(), recent.end() - static_cast<std::ptrdiff_t>(window));
}

}  // namespace

SpikeLimits spike_limits(const config::ResilienceConfig& c, const TrainState& state) {
  return {spike_limit(c, c.loss_spike_action, c.loss_spike_factor, state.recent_losses),
          spike_limit(c, c.grad_norm_spike_action, c.grad_norm_spike_factor, state.recent_norms)};
}

AnomalyDecision detect_anomalies(const config::ResilienceConfig& c, const TrainState& state, double loss,
                                 double norm) {
  AnomalyDecision result;
  const SpikeLimits limits = spike_limits(c, state);
  detect_spike(limits.loss, c.loss_spike_action, c.loss_spike_factor, state.recent_losses, "loss_spike",
               "loss", loss, result);
  detect_spike(limits.norm, c.grad_norm_spike_action, c.grad_norm_spike_factor, state.recent_norms,
               "grad_norm_spike", "gradient norm", norm, result);
  return result;
}

void append_recent(const config::ResilienceConfig& c, TrainState& state, double loss, double norm) {
  if (c.loss_spike_action != config::SpikeAction::off)
    append_recent(state.recent_losses, c.spike_window, loss);
  if (c.grad_norm_spike_action != config::SpikeAction::off)
    append_recent(state.recent_norms, c.spike_window, norm);
}

bool all_finite(const Tensor& tensor) {
  if (!tensor.defined()) return true;
  if (tensor.dtype() != DType::f32 && tensor.dtype() != DType::bf16 && tensor.dtype() != DType::f16 &&
      tensor.dtype() != DType::f64)
    return true;
  // A view that is not contiguous shows values of a contiguous tensor that was checked when it was computed.
  if (!tensor.is_contiguous()) return true;
  const auto values = tensor.to_floats();
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

void FiniteCheck::values(char phase, const std::string& name, std::span<const Parameter* const> parameters,
                         std::span<const Tensor> tensors) {
  if (!found_.empty()) return;
  if (phase == 'F' && !parameters.empty()) last_parameter_ = parameters.front()->name();
  for (const Tensor& tensor : tensors) {
    if (all_finite(tensor)) continue;
    micro_batch_ = current_;
    found_ = phase == 'F' ? "the output of `" + name + "`" : "the input gradient of `" + name + "`";
    if (!parameters.empty())
      found_ += " with `" + parameters.front()->name() + "`";
    else if (phase == 'F' && !last_parameter_.empty())
      found_ += " after `" + last_parameter_ + "`";
    found_ += " " + tensor.shape().text();
    return;
  }
}

const Parameter* first_nonfinite_parameter(const parallel::FlatStore& store) {
  for (const auto& shard : store.parameter_shards())
    if (!all_finite(shard.values())) return shard.parameter;
  return nullptr;
}

const Parameter* first_nonfinite_gradient(const parallel::FlatStore& store) {
  std::vector<Tensor> gradients;
  for (const auto& buffer : store.flat_buffers())
    gradients.push_back(buffer.host ? buffer.device_gradients : buffer.gradients);
  const auto& parameter_shards = store.parameter_shards();
  for (auto shard = parameter_shards.rbegin(); shard != parameter_shards.rend(); ++shard)
    if (shard->buffer >= 0 && !all_finite(parallel::FlatStore::range_of(*shard, shard->range, gradients)))
      return shard->parameter;
  return nullptr;
}

}  // namespace capstan::train
