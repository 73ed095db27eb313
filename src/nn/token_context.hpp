// What all layers of a forward pass share: the shape of the micro-batch and what travels with its tokens.
#pragma once

#include <cstdint>

#include "base/philox.hpp"
#include "ops/bias_dropout_add.hpp"
#include "ops/rope.hpp"
#include "tensor/tensor.hpp"

namespace capstan::nn {

// Copied into recomputed regions: tensors are views, the rest is a few words.
struct TokenContext {
  int64_t batch = 0, seq = 0;  // rows of every activation: batch * seq, sequence by sequence
  Tensor positions;            // i32 [N]
  Tensor document_start;       // i32 [N] or undefined
  Tensor row_ids;              // i64 [N], only with dropout
  Tensor stream_row_ids;       // those of the residual stream's rows, which tensor ranks may share out
  ops::RopeTable rope;         // undefined tensors without rotary positions
  bool training = false;       // dropout happens
  uint64_t seed = 0;           // of dropout

  // Of attention probabilities: all rows; of the residual stream: its rows.
  ops::Dropout attention_dropout(double p, uint64_t layer) const {
    return dropout(p, purpose::attention_dropout, layer, row_ids);
  }
  ops::Dropout stream_dropout(double p, uint32_t use, uint64_t hidden_states) const {
    return dropout(p, use, hidden_states, stream_row_ids);
  }
  ops::Dropout adapter_dropout(double p, uint64_t hidden_states) const {
    return dropout(p, purpose::adapter_dropout, hidden_states, row_ids);
  }

 private:
  ops::Dropout dropout(double p, uint32_t use, uint64_t hidden_states, const Tensor& ids) const {
    if (!training || p <= 0) return {};
    return {static_cast<float>(p), philox_key(seed, use, hidden_states), ids};
  }
};

}  // namespace capstan::nn
