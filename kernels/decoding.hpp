// Generation token by token: positions, and the choice of the next token. The number of cached tokens is a
// value on the device, so that a step can be captured once and replayed for every token.
#pragma once

#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct SamplingOptions {
  // Divides the logits before the softmax. 0: the most likely token, of equal ones the first.
  double temperature = 1;
  // Samples from the k most likely tokens. 0: from all.
  int64_t top_k = 0;
  // Samples from the most likely tokens whose probabilities add up to p.
  double top_p = 1;
  uint64_t seed = 0;
};

struct Decoding {
  // positions [batch * tokens] of new tokens that follow *past cached ones: *past + i % tokens.
  void (*positions)(Context&, const int32_t* past, int64_t batch, int64_t tokens, int32_t* positions);
  // *past += tokens.
  void (*advance)(Context&, int32_t* past, int64_t tokens);
  // tokens[r] = one token sampled from columns [0, cols) of row r of fp32 logits, or -1 where their sum is
  // not finite. The random number of row r is the one of counter block r of the sequence (seed,
  // purpose::sampling, *position). Candidates are in the order of falling logits, equal ones of rising ids;
  // probabilities are computed and summed in double, in this order. Reads 4 rows cols bytes.
  void (*sample)(Context&, SamplingOptions, const float* logits, int64_t rows, int64_t cols,
                 int64_t row_stride, const int32_t* position, int32_t* tokens);

  WorkspaceSize (*sample_workspace)(SamplingOptions, int64_t rows, int64_t cols);
};

}  // namespace capstan::kernels
