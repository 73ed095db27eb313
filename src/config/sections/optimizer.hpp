// The optimizer: which update, its coefficients and where its state lives.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"
#include "config/sections/common.hpp"

namespace capstan::config {

enum class OptimizerKind : uint8_t { adam, sgd, lion, muon };
enum class MuonScaleMode : uint8_t { spectral, unit_rms_norm, shape_scaling };
enum class MuonCoefficients : uint8_t { simple, quintic, polar_express };
enum class MuonTpMode : uint8_t { blockwise, duplicated, distributed };
// Element type of a moment estimate.
enum class MomentType : uint8_t { fp32, bf16, fp16, fp8 };

template <>
struct EnumNames<OptimizerKind> {
  static constexpr EnumEntry<OptimizerKind> list[] = {
      {OptimizerKind::adam, "adam", "Adam; with decoupled_weight_decay AdamW", "adamw"},
      {OptimizerKind::sgd, "sgd", "stochastic gradient descent with momentum"},
      {OptimizerKind::lion, "lion", "sign of an interpolated momentum"},
      {OptimizerKind::muon, "muon", "orthogonalized momentum for weight matrices, Adam for other parameters",
       "dist_muon"},
  };
};

template <>
struct EnumNames<MuonScaleMode> {
  static constexpr EnumEntry<MuonScaleMode> list[] = {
      {MuonScaleMode::spectral, "spectral", "max(rows, columns) ^ 0.5"},
      {MuonScaleMode::unit_rms_norm, "unit_rms_norm", "(rows / columns) ^ 0.5"},
      {MuonScaleMode::shape_scaling, "shape_scaling", "max(1, rows / columns) ^ 0.5"},
  };
};

template <>
struct EnumNames<MuonCoefficients> {
  static constexpr EnumEntry<MuonCoefficients> list[] = {
      {MuonCoefficients::simple, "simple", "(3.4445, -4.7750, 2.0315) in every iteration"},
      {MuonCoefficients::quintic, "quintic", "five triples, one for each of five iterations"},
      {MuonCoefficients::polar_express, "polar_express", "eight triples of Polar Express, the last repeated"},
  };
};

template <>
struct EnumNames<MuonTpMode> {
  static constexpr EnumEntry<MuonTpMode> list[] = {
      {MuonTpMode::blockwise, "blockwise", "every rank orthogonalizes its shard alone; another result"},
      {MuonTpMode::duplicated, "duplicated", "every rank gathers and orthogonalizes the full matrix"},
      {MuonTpMode::distributed, "distributed", "the ranks sum Gram matrices of their shards"},
  };
};

template <>
struct EnumNames<MomentType> {
  static constexpr EnumEntry<MomentType> list[] = {
      {MomentType::fp32, "fp32", "32-bit floating point", "float32 torch.float32 32"},
      {MomentType::bf16, "bf16", "bfloat16: 8 exponent bits, 7 mantissa bits", "bfloat16 torch.bfloat16"},
      {MomentType::fp16, "fp16", "IEEE half precision: 5 exponent bits, 10 mantissa bits",
       "float16 half torch.float16"},
      {MomentType::fp8, "fp8", "E4M3 with an fp32 scale per 64 elements", "uint8 torch.uint8"},
  };
};

struct OptimizerConfig {
  OptimizerKind optimizer = OptimizerKind::adam;
  double lr = 0.0;
  // Derived: min_lr_ratio * lr.
  std::optional<double> min_lr;
  std::optional<double> min_lr_ratio;
  std::optional<double> decoupled_lr;
  std::optional<double> decoupled_min_lr;
  double weight_decay = 0.01;
  bool decoupled_weight_decay = true;
  bool apply_wd_to_qk_layernorm = false;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  double sgd_momentum = 0.9;
  double lion_beta1 = 0.95;
  double lion_beta2 = 0.98;
  double muon_momentum = 0.95;
  bool muon_use_nesterov = false;
  int64_t muon_num_ns_steps = 5;
  MuonCoefficients muon_coefficient_type = MuonCoefficients::quintic;
  MuonScaleMode muon_scale_mode = MuonScaleMode::spectral;
  double muon_extra_scale_factor = 1.0;
  bool muon_split_qkv = true;
  MuonTpMode muon_tp_mode = MuonTpMode::duplicated;
  double clip_grad = 1.0;
  std::optional<double> grad_norm_skip_threshold;
  bool use_precision_aware_optimizer = false;
  Precision main_grads_dtype = Precision::fp32;
  Precision main_params_dtype = Precision::fp32;
  MomentType exp_avg_dtype = MomentType::fp32;
  MomentType exp_avg_sq_dtype = MomentType::fp32;
  bool stochastic_rounding = false;
  bool optimizer_cpu_offload = false;
  double optimizer_offload_fraction = 1.0;
  std::optional<Path> optimizer_offload_path;
  int64_t optimizer_offload_chunk_size = 4'194'304;
};

}  // namespace capstan::config
