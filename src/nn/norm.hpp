#pragma once

#include "nn/param_list.hpp"
#include "ops/norm.hpp"

namespace capstan::nn {

struct NormKind {
  bool rms = false;
  double epsilon = 1e-5;
  bool zero_centered_gamma = false;  // gamma is stored as gamma - 1

  ops::NormOptions options() const {
    return {rms, static_cast<float>(epsilon), zero_centered_gamma ? 1.0f : 0.0f};
  }
};

// gamma (and, for LayerNorm, beta) of one norm.
class Norm {
 public:
  // What the norm sees on a tensor-parallel rank: rows of the residual stream, which may be cut; or some of the heads.
  enum class Over : uint8_t { rows, heads };
  Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, Over over = Over::rows);
  // Of features that the tensor ranks share out: each holds its part of gamma.
  Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, const Sharding& cut);

  // sum = x + residual (an undefined residual is none), y = norm(sum).
  ops::NormResult forward(Tape& tape, Var x, const Var& residual) const {
    return ops::norm(tape, std::move(x), residual, *gamma_, beta_, kind_.options());
  }
  const Parameter* gamma() const { return gamma_; }
  const Parameter* beta() const { return beta_; }  // null for RMSNorm

 private:
  Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, bool partial,
       const Sharding& cut);
  NormKind kind_;
  const Parameter* gamma_;
  const Parameter* beta_ = nullptr;
};

}  // namespace capstan::nn
