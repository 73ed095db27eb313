// What the trainer, evaluation and generation know of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/attention.hpp"
#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::models {

// One micro-batch. N = batch * seq rows, sequence by sequence.
struct Batch {
  int64_t batch = 0, seq = 0;
  Tensor tokens;          // i32 [N]
  Tensor labels;          // i32 [N]
  Tensor loss_mask;       // fp32 [N], weights of the tokens' losses
  Tensor positions;       // i32 [N]; undefined: 0 … seq - 1 in every sequence
  Tensor document_start;  // i32 [N], index within its sequence of the first token of the token's document;
                          // undefined: 0
  Tensor row_ids;         // i64 [N], one id for each token of the run; needed with dropout only
};

struct ForwardOptions {
  bool training = true;   // dropout happens
  uint64_t seed = 0;      // of dropout: rng.seed
  bool recompute = true;  // as the model section says; false keeps every activation
};

// Sums over the micro-batch's tokens, weighted with the loss mask; nothing is divided by a count.
struct Loss {
  Var sum;           // fp32 [1], also the tape's output "loss": backward({{"loss", ones}}) with exactly 1
  Tensor exact_sum;  // f64 [1], the same in double: what to log and to add over micro-batches and ranks
  Tensor per_token;  // fp32 [N], -log p(label) in natural logarithm, unweighted
};

// The state of a generation: a batch of sequences of equal length.
struct KvCache {
  int64_t batch = 0, capacity = 0;  // sequences, tokens of each
  int64_t past = 0;                 // tokens seen so far
  std::vector<ops::KvCache> layers;
  ops::RopeTable rope;
};

class Model {
 public:
  virtual ~Model() = default;

  // In the order of the forward pass; nothing is allocated for them here. Addresses are stable while the
  // model lives.
  virtual const std::vector<std::unique_ptr<Parameter>>& parameters() const = 0;

  // A training step's forward, or, on an inference tape, the losses alone.
  virtual Loss forward(Tape& tape, const Batch& batch, const ForwardOptions& options) const = 0;

  // Generation, on an inference tape: feeds tokens i32 [batch, new] after those in the cache; fp32 [batch,
  // vocab] logits of each sequence's last token. Errors: usage when the tokens do not fit the cache or the
  // model's positions.
  virtual KvCache make_cache(int64_t batch, int64_t capacity) const = 0;
  virtual Tensor next_logits(Tape& tape, const Tensor& tokens, KvCache& cache) const = 0;

  // fp32 [N, vocab] logits of every token, on an inference tape: small inputs only.
  virtual Tensor all_logits(Tape& tape, const Batch& batch) const = 0;
};

}  // namespace capstan::models
