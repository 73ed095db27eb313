#pragma once

#include <functional>
#include <memory>

#include "nn/attention.hpp"
#include "nn/feed_forward.hpp"

namespace capstan::nn {

// The hidden states between sublayers: residual + pending. `pending` is the output of the previous branch,
// which the next norm adds in the same kernel.
struct HiddenStates {
  Var residual;
  // May be undefined.
  Var pending;
  bool has_pending() const { return pending.value.defined(); }
};

// residual + pending as one tensor, at the boundary of recomputed regions or stages.
Var materialize(Tape& tape, HiddenStates hidden_states);

// The sum residual + pending, and its norm.
ops::NormResult normalize(Tape& tape, const Norm& norm, HiddenStates hidden_states,
                          const Parameter* reader = nullptr);

// One layer of a decoder: attention and a feed-forward part, in the arrangement of its class.
class DecoderLayer {
 public:
  // What the arrangements share.
  struct Options {
    int64_t hidden = 0;
    NormKind norm;
    double hidden_dropout = 0;
    std::function<std::unique_ptr<Attention>(ParamList&, const ModulePath&)> attention;
    std::function<std::unique_ptr<FeedForward>(ParamList&, const ModulePath&)> feed_forward;
    // Saves only the input of the feed-forward part.
    bool recompute_feed_forward = false;
    // Frees the outputs of the input norms after their last reader, and recomputes them from the residual.
    bool recompute_norms = false;
  };
  virtual ~DecoderLayer() = default;

  virtual HiddenStates forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                               const LayerCache& cache = {}) const = 0;
  // See FeedForward::adds_losses.
  bool adds_losses() const { return feed_forward_->adds_losses(); }

 protected:
  DecoderLayer(const ModulePath& path, const Options& options);

  // The reader of the feed-forward part's input, for the norm before it.
  const Parameter* feed_forward_reader() const;
  Var run_feed_forward(Tape& tape, const Var& x, const TokenContext& context) const;
  // residual + dropout(branch + bias). Without bias and dropout, the next norm does the addition.
  // sublayer: 0 or 1, selects the dropout mask.
  HiddenStates add_branch(Tape& tape, Var residual, Var branch, const Parameter* bias,
                          const TokenContext& context, uint64_t sublayer) const;

  // Set by the constructor of the arrangement, in the order of the forward pass.
  std::unique_ptr<Attention> attention_;
  std::unique_ptr<FeedForward> feed_forward_;
  bool recompute_norms_;

 private:
  double hidden_dropout_;
  bool recompute_feed_forward_;
  uint64_t layer_;
};

}  // namespace capstan::nn
