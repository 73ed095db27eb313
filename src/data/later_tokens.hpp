// What multi-token prediction reads of a micro-batch: tokens and labels further on in the sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "data/loader.hpp"

namespace capstan::data {

// All [B, T].
struct LaterTokens {
  std::vector<int32_t> tokens, labels, position_ids;
  std::vector<float> loss_mask;
};

// Tokens, labels, loss mask and positions `by` places further on, as Megatron rolls them: within a sequence,
// or within a document where attention ends there (cu_seqlens). Places without such a token hold 0, and have
// no loss. The loss mask of a row is multiplied by (its sum before) / (its sum after), so that a row weighs
// as much as in the loss of the batch; Megatron takes this ratio over a micro-batch, which depends on the
// layout.
LaterTokens later_tokens(const MicroBatch& batch, int64_t by);

}  // namespace capstan::data
