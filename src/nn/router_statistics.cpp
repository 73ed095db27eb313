#include "nn/router_statistics.hpp"

#include "ops/matmul.hpp"

namespace capstan::nn {

RouterStatistics::RouterStatistics(Device& device, const std::vector<int64_t>& layers, int64_t experts,
                                   bool global_batch)
    : experts_(experts) {
  for (const int64_t layer : layers) rows_.emplace(layer, static_cast<int64_t>(rows_.size()));
  CategoryScope scope(MemoryCategory::workspace);
  sums_ = Tensor::zeros(device, {static_cast<int64_t>(layers.size()), experts + 2});
  if (global_batch) batch_.resize(layers.size());
  for (BatchChoices& of_layer : batch_) of_layer.counts = Tensor::zeros(device, {experts});
}

void RouterStatistics::clear() {
  sums_.device().zero(sums_.address(), sums_.bytes());
  for (BatchChoices& of_layer : batch_) {
    of_layer.counts.device().zero(of_layer.counts.address(), of_layer.counts.bytes());
    of_layer.number = 0;
  }
}

void RouterStatistics::add(int64_t layer, const Tensor& counts, const Tensor& balance_loss,
                           const Tensor& z_loss) {
  const int64_t first = rows_.at(layer) * (experts_ + 2);
  ops::add_into(counts.view({experts_}), sums_.flat_range(first, experts_, {experts_}));
  if (balance_loss.defined()) ops::add_into(balance_loss, sums_.flat_range(first + experts_, 1, {1}));
  if (z_loss.defined()) ops::add_into(z_loss, sums_.flat_range(first + experts_ + 1, 1, {1}));
}

RouterStatistics::BatchChoices RouterStatistics::add_to_batch(int64_t layer,
                                                              const BatchChoices& micro_batch) {
  BatchChoices& sums = batch_.at(static_cast<size_t>(rows_.at(layer)));
  ops::add_into(micro_batch.counts.view({experts_}), sums.counts);
  sums.number += micro_batch.number;
  return sums;
}

}  // namespace capstan::nn
