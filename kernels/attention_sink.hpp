// Attention sinks: a further logit of each head in the denominator of its softmax, without a value, so that
// the probabilities of a query's keys sum to less than 1. They apply to the result of attention without them
// (attention.hpp), of all keys of a query together.
//
// Bytes moved, of e-byte elements and T tokens: forward reads and writes e T heads * v_dim and 4 T heads;
// backward reads 2 e T heads * v_dim and 4 T heads.
#pragma once

#include "kernels/attention.hpp"

namespace capstan::kernels {

// Of the shape, groups, heads_per_group, v_dim, batch and seq are read. logits [heads], fp32, bf16 or fp16;
// null: all are 0.
struct AttentionSink {
  // With r = sigmoid(lse - logit): out *= r and lse -= log r. The result is what Attention::backward expects
  // for queries, keys and values.
  void (*forward)(Context&, AttentionShape, In logits, HeadsOut out, float* lse);
  // dlogits[h] -= the sum over the queries of head h of exp(logit - lse) (dout · out). out and lse: those of
  // `forward`. dlogits fp32 [heads].
  void (*backward)(Context&, AttentionShape, In logits, HeadsIn out, const float* lse, HeadsIn dout,
                   float* dlogits);
};

}  // namespace capstan::kernels
