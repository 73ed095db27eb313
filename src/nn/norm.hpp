#pragma once

#include <optional>

#include "nn/param_list.hpp"
#include "ops/norm.hpp"

namespace capstan::nn {

struct NormKind {
  bool rms = false;
  double epsilon = 1e-5;
  // Gamma is stored as gamma - 1.
  bool zero_centered_gamma = false;

  ops::NormOptions options() const {
    return {rms, static_cast<float>(epsilon), zero_centered_gamma ? 1.0f : 0.0f};
  }
};

// gamma (and, for LayerNorm, beta) of one norm.
class Norm {
 public:
  // The input of the norm on a tensor-parallel rank: rows of the hidden states, which may be sharded, or some
  // of the heads.
  enum class Input : uint8_t { rows, heads };
  Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, Input over = Input::rows);
  // A norm over features that are sharded: each tensor-parallel rank holds a shard of gamma.
  Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, const Sharding& sharding);

  // sum = x + residual, y = norm(sum). `residual` may be undefined; sum is then x. reader: see ops::norm.
  ops::NormResult forward(Tape& tape, Var x, const Var& residual, const Parameter* reader = nullptr) const {
    return ops::norm(tape, std::move(x), residual, *gamma_, beta_, kind_.options(), reader);
  }
  const Parameter* gamma() const { return gamma_; }
  // Null for RMSNorm.
  const Parameter* beta() const { return beta_; }

 private:
  Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, bool partial,
       const Sharding& sharding);
  NormKind kind_;
  const Parameter* gamma_;
  const Parameter* beta_ = nullptr;
};

// nullopt without a kind.
std::optional<Norm> optional_norm(ParamList& parameters, const ModulePath& path, int64_t width,
                                  const std::optional<NormKind>& kind);

}  // namespace capstan::nn
