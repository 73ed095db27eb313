#pragma once

#include "nn/param_list.hpp"
#include "nn/token_context.hpp"

namespace capstan::nn {

// Token vectors, with learned positions where asked for, and the dropout on both. Over tensor-parallel ranks each has a run of
// the vocabulary, and the result's rows are those of the residual stream.
class Embedding {
 public:
  struct Options {
    int64_t vocab = 0;      // rows, padding included
    int64_t positions = 0;  // rows of the position table; 0: none
    int64_t hidden = 0;
    double dropout = 0;
    double multiplier = 1;  // of the token vectors, rounded to the compute type
    Init init;
    std::vector<std::string> places;  // where else the table is used
    ParamSpec::Tied tied = ParamSpec::Tied::no;
  };
  Embedding(ParamList& parameters, const std::string& prefix, const Options& options);

  Var forward(Tape& tape, const Tensor& tokens, const TokenContext& context) const;
  const Parameter& words() const { return *words_; }

 private:
  ops::TensorParallel parallel_;
  double dropout_, multiplier_;
  const Parameter* words_;
  const Parameter* positions_ = nullptr;
};

}  // namespace capstan::nn
