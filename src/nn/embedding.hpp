#pragma once

#include "nn/param_list.hpp"
#include "nn/token_context.hpp"

namespace capstan::nn {

// Token embedding, plus learned position embedding where configured, and dropout. Each tensor-parallel rank
// holds a consecutive range of the vocabulary; the result has the rows of the hidden states.
class Embedding {
 public:
  struct Options {
    // Rows, padding included.
    int64_t vocab = 0;
    // Rows of the position table; 0: none.
    int64_t positions = 0;
    int64_t hidden = 0;
    double dropout = 0;
    // Factor of the token embedding, rounded to the compute type.
    double multiplier = 1;
    Init init;
    // ParamSpec::other_uses.
    std::vector<std::string> other_uses;
    // Of the token embedding, and of the position embedding.
    ParamSpec::Tied tied = ParamSpec::Tied::no, positions_tied = ParamSpec::Tied::no;
  };
  Embedding(ParamList& parameters, const std::string& prefix, const Options& options);

  // use: tells the dropout of several embeddings of a micro-batch apart.
  Var forward(Tape& tape, const Tensor& tokens, const TokenContext& context, uint64_t use = 0) const;
  const Parameter& words() const { return *words_; }

 private:
  ops::TensorParallel parallel_;
  double dropout_, multiplier_;
  const Parameter* words_;
  const Parameter* positions_ = nullptr;
};

}  // namespace capstan::nn
