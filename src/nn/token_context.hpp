// The inputs that all layers of a forward pass share: the shape of the micro-batch and per-token tensors.
#pragma once

#include <cstdint>

#include "base/philox.hpp"
#include "nn/router_statistics.hpp"
#include "ops/bias_dropout_add.hpp"
#include "ops/rope.hpp"
#include "ops/router_logits.hpp"
#include "tensor/tensor.hpp"

namespace capstan::nn {

// Cheap to copy into recomputed regions: tensors are views.
struct TokenContext {
  // Rows of every activation: batch * seq, sequence by sequence.
  int64_t batch = 0, seq = 0;
  Tensor positions;  // i32 [N]
  ops::Documents documents;
  // i64 [N], only with dropout or jitter.
  Tensor dropout_rows;
  // dropout_rows of the hidden states' rows, which may be sharded over tensor-parallel ranks.
  Tensor hidden_dropout_rows;
  // i32, 1 for those of the hidden states' rows that are padding, which no expert gets; undefined: none is.
  Tensor padding;
  // The tokens of the micro-batch on all ranks that share it, without padding.
  int64_t tokens = 0;
  // Undefined tensors without rotary positions.
  ops::RopeTable rope;
  // Enables dropout, and the losses and the jitter of routers.
  bool training = false;
  // fp32 [1], with experts and in training only: the sum of the loss weights of the micro-batch's tokens, by
  // which the routers' losses are multiplied.
  Tensor loss_weight_sum;
  // Null: not counted.
  RouterStatistics* router_statistics = nullptr;
  // Seed of dropout and of jitter.
  uint64_t seed = 0;

  // Dropout of attention probabilities uses the indices of all rows, dropout of hidden states those of its
  // local rows.
  ops::Dropout attention_dropout(double p, uint64_t layer) const {
    return dropout(p, purpose::attention_dropout, layer, dropout_rows);
  }
  ops::Dropout hidden_dropout(double p, uint32_t use, uint64_t sequence) const {
    return dropout(p, use, sequence, hidden_dropout_rows);
  }
  // rows: indices of the rows that the adapted layer reads.
  ops::Dropout adapter_dropout(double p, uint64_t sequence, const Tensor& rows) const {
    return dropout(p, purpose::adapter_dropout, sequence, rows);
  }
  ops::Jitter router_jitter(double epsilon, uint64_t layer) const {
    if (!training || epsilon <= 0) return {};
    return {static_cast<float>(epsilon), philox_key(seed, purpose::router_jitter, layer),
            hidden_dropout_rows};
  }

 private:
  ops::Dropout dropout(double p, uint32_t use, uint64_t sequence, const Tensor& rows) const {
    if (!training || p <= 0) return {};
    return {static_cast<float>(p), philox_key(seed, use, sequence), rows};
  }
};

}  // namespace capstan::nn
