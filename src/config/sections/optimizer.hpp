// The optimizer: which update, its coefficients and where its state lives.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"
#include "config/sections/common.hpp"

namespace capstan::config {

enum class OptimizerKind : uint8_t { adam, sgd, lion, muon };
enum class MuonScaleMode : uint8_t { spectral, unit_rms_norm, shape_scaling };

template <>
struct EnumNames<OptimizerKind> {
  static constexpr EnumEntry<OptimizerKind> list[] = {
      {OptimizerKind::adam, "adam", "Adam; with decoupled_weight_decay AdamW", "adamw"},
      {OptimizerKind::sgd, "sgd", "stochastic gradient descent with momentum"},
      {OptimizerKind::lion, "lion", "sign of an interpolated momentum"},
      {OptimizerKind::muon, "muon", "orthogonalized momentum for weight matrices, Adam for other parameters"},
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
  MuonScaleMode muon_scale_mode = MuonScaleMode::spectral;
  double clip_grad = 1.0;
  std::optional<double> grad_norm_skip_threshold;
  bool use_precision_aware_optimizer = false;
  Precision main_grads_dtype = Precision::fp32;
  Precision main_params_dtype = Precision::fp32;
  Precision exp_avg_dtype = Precision::fp32;
  Precision exp_avg_sq_dtype = Precision::fp32;
  bool optimizer_cpu_offload = false;
  double optimizer_offload_fraction = 1.0;
};

}  // namespace capstan::config
