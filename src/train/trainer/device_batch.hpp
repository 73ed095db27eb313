// A micro-batch on the device, as one rank of a context-parallel group holds it.
#pragma once

#include <cstdint>
#include <vector>

#include "data/loader.hpp"
#include "models/model.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

// The tokens of each sequence that a context-parallel rank holds: those of ops::context_rows().
struct ContextShard {
  int64_t ranks = 1, rank = 0;
  std::vector<int64_t> positions(int64_t seq) const;
};

// Copies this rank's tokens of a micro-batch to the device. `dropout_rows`: with dropout row indices, which
// only dropout reads.
models::Batch upload(Device& device, const data::MicroBatch& batch, bool dropout_rows,
                     ContextShard shard = {});

// The sum of the loss weights of this rank's tokens.
double loss_tokens(const data::MicroBatch& batch, ContextShard shard = {});

}  // namespace capstan::train
