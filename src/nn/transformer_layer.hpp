#pragma once

#include "nn/attention.hpp"
#include "nn/mlp.hpp"

namespace capstan::nn {

// The residual stream between sublayers. A branch's output waits in `pending` until the next norm adds it in
// the same pass; the stream's value is residual + pending.
struct ResidualStream {
  Var residual;
  Var pending;  // an undefined value: nothing waits
  bool has_pending() const { return pending.value.defined(); }
};

// The value as one tensor: at a boundary of recomputed regions or stages.
Var closed(Tape& tape, ResidualStream stream);

// sum and norm of the stream's value.
ops::NormResult normalise(Tape& tape, const Norm& norm, ResidualStream stream);

// Pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).
class TransformerLayer {
 public:
  struct Options {
    NormKind norm;
    SelfAttention::Options attention;
    Mlp::Options mlp;
    double hidden_dropout = 0;
    bool residual_from_norm = false;  // the residual is the norm's output instead of its input
    bool recompute_mlp = false;       // keep only the MLP's input
  };
  TransformerLayer(ParamList& parameters, const Place& place, const Options& options);

  ResidualStream forward(Tape& tape, ResidualStream stream, const TokenContext& context,
                         const LayerCache& cache = {}) const;

 private:
  ResidualStream add_branch(Tape& tape, ops::NormResult before, Var branch, const Parameter* bias,
                            const TokenContext& context, uint64_t sublayer) const;
  Options options_;
  uint64_t layer_;
  Norm input_norm_;
  SelfAttention attention_;
  Norm mlp_norm_;
  Mlp mlp_;
};

}  // namespace capstan::nn
