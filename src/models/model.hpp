// What the trainer, evaluation and generation know of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nn/adapter.hpp"
#include "nn/parallel.hpp"
#include "ops/attention.hpp"
#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::models {

// A run of layers that one pipeline rank computes together.
struct Stage {
  int64_t first_layer = 0, layers = 0;
  bool embedding = false, head = false;
};

// What one rank holds of a model: its stages in the order of the forward pass, and the ranks over which their layers are cut.
struct ModelShard {
  std::vector<Stage> stages;  // empty: one stage, the whole model
  nn::Parallel parallel;
  std::shared_ptr<const nn::AdapterOptions> adapters;  // null: none
};

// One micro-batch. N = batch * seq rows, sequence by sequence.
struct Batch {
  int64_t batch = 0, seq = 0;  // seq: tokens of each sequence that are on this rank
  int64_t positions_end = 0;   // above every position; 0: seq
  Tensor tokens;               // i32 [N]
  Tensor labels;               // i32 [N]
  Tensor loss_mask;            // fp32 [N], weights of the tokens' losses
  Tensor positions;            // i32 [N]; undefined: 0 … seq - 1 in every sequence
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
  int64_t holds_to =
      0;  // after the first step: above so many tokens what is in it does not hold (longrope), and all
          // tokens must go through a new one
  std::vector<ops::KvCache> layers;
  ops::RopeTable rope;
};

// What a stage gives: the residual stream for the next one, or at the head the loss.
struct StageOutput {
  Var hidden_states;  // [rows, hidden], also the tape's output "stream"; rows are N, or this tensor rank's share of them
  Loss loss;
};

class Model {
 public:
  virtual ~Model() = default;

  // Those of this rank's stages, in the order of the forward pass; nothing is allocated for them here. Addresses are stable
  // while the model lives.
  virtual const std::vector<std::unique_ptr<Parameter>>& parameters() const = 0;
  virtual const std::vector<Stage>& stages() const = 0;
  virtual int64_t hidden() const = 0;  // columns of the stream between stages

  // A training step's forward through one of this rank's stages, or, on an inference tape, the same without a record. `stream`
  // is what the stage before gave, an input of the tape; undefined where the stage begins with the embedding.
  virtual StageOutput forward_stage(Tape& tape, size_t stage, const Batch& batch, const Var& hidden_states,
                                    const ForwardOptions& options) const = 0;
  // The whole model in one stage.
  Loss forward(Tape& tape, const Batch& batch, const ForwardOptions& options) const {
    return forward_stage(tape, 0, batch, {}, options).loss;
  }

  // Generation, on an inference tape: feeds tokens i32 [batch, new] after those in the cache. A stage gives the stream
  // [batch * new, hidden], at the head fp32 [batch, vocab] logits of each sequence's last token. The caller advances
  // cache.past by `new` when all stages have run. Errors: usage when the tokens do not fit the cache, what it holds to, or the
  // model's positions.
  virtual KvCache make_cache(int64_t batch, int64_t capacity) const = 0;
  virtual Tensor next_stage(Tape& tape, size_t stage, const Tensor& tokens, const Tensor& hidden_states,
                            KvCache& cache) const = 0;
  // The whole model in one stage; advances the cache.
  Tensor next_logits(Tape& tape, const Tensor& tokens, KvCache& cache) const {
    Tensor logits = next_stage(tape, 0, tokens, {}, cache);
    cache.past += tokens.elements() / cache.batch;
    return logits;
  }

  // fp32 [N, vocab] logits of every token of the whole model, on an inference tape: small inputs only.
  virtual Tensor all_logits(Tape& tape, const Batch& batch) const = 0;
};

}  // namespace capstan::models
