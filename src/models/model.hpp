// The interface of a model to training, evaluation and generation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nn/adapter.hpp"
#include "nn/parallel.hpp"
#include "nn/router_statistics.hpp"
#include "ops/attention.hpp"
#include "ops/decoding.hpp"
#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::models {

// Consecutive layers that one pipeline rank computes together.
struct Stage {
  int64_t first_layer = 0, layers = 0;
  bool embedding = false, head = false;
  // Depths of multi-token prediction: of this stage, and of an earlier one. All are in one stage, after which
  // only the head follows.
  int64_t mtp_layers = 0, mtp_before = 0;

  // The final norm comes before multi-token prediction.
  bool final_norm() const { return mtp_layers > 0 || (head && mtp_before == 0); }
  // Tensors of hidden states in the input and in the output of a training pass: those of the model and of
  // each depth so far.
  int64_t states_in() const { return 1 + mtp_before; }
  int64_t states_out() const { return 1 + mtp_before + mtp_layers; }
};

// The shard of a model that one rank holds: its stages in the order of the forward pass, and the ranks over
// which their layers are sharded.
struct ModelShard {
  // Empty: one stage with the full model.
  std::vector<Stage> stages;
  nn::Parallel parallel;
  // Null: none.
  std::shared_ptr<const nn::AdapterOptions> adapters;
};

// What one depth of multi-token prediction reads instead of the batch's own tokens and labels: those further
// on in the sequence.
struct LaterTokens {
  Tensor tokens;  // i32 [N]
  Tensor labels;  // i32 [N]
  // fp32 [N], weights of the depth's losses: 0 where the sequence ends before the label.
  Tensor loss_mask;
  // i32 [N], positions of `tokens`; undefined without learned positions.
  Tensor positions;
};

// One micro-batch. N = batch * seq rows, sequence by sequence.
struct Batch {
  // Sequences, local tokens of each.
  int64_t batch = 0, seq = 0;
  // Exclusive bound of the positions; 0: seq.
  int64_t positions_end = 0;
  Tensor tokens;  // i32 [N]
  Tensor labels;  // i32 [N]
  // fp32 [N], weights of the tokens' losses.
  Tensor loss_mask;
  // i32 [N]; undefined: 0 … seq - 1 in every sequence.
  Tensor positions;
  // i32 [N], index in its sequence of the first token of the token's document; undefined: 0.
  Tensor document_start;
  // i32 [documents + 1], with document_start: the first row of each document among the batch * S rows of the
  // full sequences (S tokens each), then batch * S.
  Tensor cu_seqlens;
  // Tokens of the longest document.
  int64_t max_seqlen = 0;
  // i32 [N], 1 for the positions of a row behind its last document, which are sent to no expert, else 0;
  // undefined: there are none.
  Tensor padding;
  // Tokens of the full sequences without padding; 0: all.
  int64_t tokens_in_use = 0;
  // i64 [N], dropout row index of each token, unique in the run; with dropout only.
  Tensor dropout_rows;
  // One for each depth of multi-token prediction, in training only.
  std::vector<LaterTokens> later;
};

struct ForwardOptions {
  // Enables dropout and multi-token prediction.
  bool training = true;
  // Seed of dropout: rng.seed.
  uint64_t seed = 0;
  // Follow the model section; false: save every activation.
  bool recompute = true;
  // Counts the tokens of each expert; null: they are not counted.
  nn::RouterStatistics* router_statistics = nullptr;
};

// Sums over the micro-batch's tokens, weighted with the loss mask and not divided by a count.
struct Loss {
  // fp32 [1], also the tape's output "loss"; its gradient must be 1.
  Var sum;
  // fp64 [1], for logging and sums over micro-batches and ranks.
  Tensor exact_sum;
  // fp32 [N], -log p(label) in natural logarithm, unweighted.
  Tensor per_token;
  // fp64 [1] for each depth of multi-token prediction: the sum of its losses, weighted with its loss mask.
  // Its gradient starts from the tape's output mtp_loss_name(depth), likewise with 1.
  std::vector<Tensor> mtp_sums;
};

// "mtp_1_loss" of the first depth: the name of its output on the tape, and in logs.
inline std::string mtp_loss_name(size_t depth) {
  return "mtp_" + std::to_string(depth) + "_loss";
}

// The state of a generation: a batch of sequences of equal length.
struct KvCache {
  // Sequences, tokens of each.
  int64_t batch = 0, capacity = 0;
  // Cached tokens: on the host, which checks the capacity, and on the device, i32 [1], where kernels read it.
  int64_t past = 0;
  Tensor past_on_device;
  // Largest sequence length for which the cached keys stay valid, known after the first step; LongRoPE
  // switches frequencies beyond it, and the tokens must be run again with a new cache.
  int64_t valid_length = 0;
  std::vector<ops::LayerKvCache> layers;
  ops::RopeTable rope;
  // Counts `tokens` more cached tokens of each sequence.
  void advance(int64_t tokens) {
    past += tokens;
    ops::advance(past_on_device, tokens);
  }
};

// The result of a stage: hidden states for the next stage, or the loss.
struct StageResult {
  // [states * rows, hidden], also the tape's output "hidden_states"; rows: N, or a tensor-parallel shard of
  // N; states: in training Stage::states_out(), else 1.
  Var hidden_states;
  Loss loss;
};

class Model {
 public:
  virtual ~Model() = default;

  // The parameters of this rank's stages, in the order of the forward pass. The model allocates no memory for
  // them. Addresses are stable while the model lives.
  virtual const std::vector<std::unique_ptr<Parameter>>& parameters() const = 0;
  virtual const std::vector<Stage>& stages() const = 0;
  // Hidden size.
  virtual int64_t hidden() const = 0;

  // The forward pass of one of this rank's stages. `hidden_states`: the result of the previous stage, an
  // input of the tape; undefined for a stage with the embedding.
  virtual StageResult forward_stage(Tape& tape, size_t stage, const Batch& batch, const Var& hidden_states,
                                    const ForwardOptions& options) const = 0;
  // The forward pass of a model in one stage.
  Loss forward(Tape& tape, const Batch& batch, const ForwardOptions& options) const {
    return forward_stage(tape, 0, batch, {}, options).loss;
  }

  // Generation, on an inference tape: runs tokens i32 [batch, new] that follow the cached ones. A stage
  // returns hidden states [batch * new, hidden]; the last stage returns the logits of each sequence's last
  // token, fp32 [batch, vocab]. The caller advances the cache by `new` when all stages have run. Errors:
  // usage when the tokens exceed the cache, its valid length, or the model's positions.
  virtual KvCache make_cache(Device& device, int64_t batch, int64_t capacity) const = 0;
  virtual Tensor decode_stage(Tape& tape, size_t stage, const Tensor& tokens, const Tensor& hidden_states,
                              KvCache& cache) const = 0;
  // The same for a model in one stage; advances the cache.
  Tensor next_logits(Tape& tape, const Tensor& tokens, KvCache& cache) const {
    Tensor logits = decode_stage(tape, 0, tokens, {}, cache);
    cache.advance(tokens.elements() / cache.batch);
    return logits;
  }

  // The logits of every token of a model in one stage, fp32 [N, vocab], on an inference tape: for small
  // inputs.
  virtual Tensor all_logits(Tape& tape, const Batch& batch) const = 0;
};

}  // namespace capstan::models
