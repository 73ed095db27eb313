#include "nn/router_statistics.hpp"

#include "ops/matmul.hpp"

namespace capstan::nn {

RouterStatistics::RouterStatistics(Device& device, const std::vector<int64_t>& layers, int64_t experts,
                                   int64_t balance_losses, bool global_batch)
    : experts_(experts), balance_losses_(balance_losses) {
  for (const int64_t layer : layers) rows_.emplace(layer, static_cast<int64_t>(rows_.size()));
  CategoryScope scope(MemoryCategory::workspace);
  sums_ = Tensor::zeros(device, {static_cast<int64_t>(layers.size()), experts + balance_losses + 2});
  if (global_batch) batch_.resize(layers.size());
  for (Tensor& of_layer : batch_) of_layer = Tensor::zeros(device, {experts});
}

void RouterStatistics::clear() {
  sums_.device().zero(sums_.address(), sums_.bytes());
  for (const Tensor& of_layer : batch_) of_layer.device().zero(of_layer.address(), of_layer.bytes());
}

void RouterStatistics::add(int64_t layer, const Tensor& counts, std::span<const Var> balance,
                           const Var& z_loss) {
  int64_t at = rows_.at(layer) * sums_.size(1);
  ops::add_into(counts.view({experts_}), sums_.flat_range(at, experts_, {experts_}));
  at += experts_;
  for (size_t i = 0; i < balance.size(); ++i)
    ops::add_into(balance[i].value, sums_.flat_range(at + static_cast<int64_t>(i), 1, {1}));
  at += balance_losses_;
  if (z_loss.value.defined()) ops::add_into(z_loss.value, sums_.flat_range(at, 1, {1}));
}

Tensor RouterStatistics::dropped(int64_t layer) const {
  return sums_.flat_range((rows_.at(layer) + 1) * sums_.size(1) - 1, 1, {1});
}

const Tensor& RouterStatistics::add_to_batch(int64_t layer, const Tensor& counts) {
  const Tensor& sums = batch_.at(static_cast<size_t>(rows_.at(layer)));
  ops::add_into(counts.view({experts_}), sums);
  return sums;
}

}  // namespace capstan::nn
