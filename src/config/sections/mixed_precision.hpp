// Number formats: of parameters, gradients' reduction, activations between stages, and low-precision matrix
// products. This section owns them all; `ddp.grad_reduce_in_fp32`, `optimizer.loss_scale` and the like are
// names for its fields.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"
#include "config/sections/common.hpp"

namespace capstan::config {

enum class Fp8Format : uint8_t { e4m3, hybrid };
enum class Fp8Recipe : uint8_t { delayed, tensorwise, mxfp8, blockwise };
enum class Fp8AmaxAlgo : uint8_t { most_recent, max };
enum class Fp4Format : uint8_t { e2m1 };
enum class Fp4Recipe : uint8_t { nvfp4 };

template <>
struct EnumNames<Fp8Format> {
  static constexpr EnumEntry<Fp8Format> list[] = {
      {Fp8Format::e4m3, "e4m3", "e4m3 (4 exponent bits) for all tensors"},
      {Fp8Format::hybrid, "hybrid", "e4m3 in the forward pass, e5m2 for gradients"},
  };
};

template <>
struct EnumNames<Fp8Recipe> {
  static constexpr EnumEntry<Fp8Recipe> list[] = {
      {Fp8Recipe::delayed, "delayed", "delayed scaling: from the amax history of earlier steps"},
      {Fp8Recipe::tensorwise, "tensorwise", "current scaling: from the amax of each tensor"},
      {Fp8Recipe::mxfp8, "mxfp8", "MXFP8: a power-of-two scale per 32 elements"},
      {Fp8Recipe::blockwise, "blockwise", "block scaling: blocks of 1 x 128 and 128 x 128 elements"},
  };
};

template <>
struct EnumNames<Fp8AmaxAlgo> {
  static constexpr EnumEntry<Fp8AmaxAlgo> list[] = {
      {Fp8AmaxAlgo::most_recent, "most_recent", "the most recent amax"},
      {Fp8AmaxAlgo::max, "max", "the maximum of the history"},
  };
};

template <>
struct EnumNames<Fp4Format> {
  static constexpr EnumEntry<Fp4Format> list[] = {
      {Fp4Format::e2m1, "e2m1", "2 exponent bits, 1 mantissa bit"},
  };
};

template <>
struct EnumNames<Fp4Recipe> {
  static constexpr EnumEntry<Fp4Recipe> list[] = {
      {Fp4Recipe::nvfp4, "nvfp4", "NVFP4: an FP8 scale per 16 elements"},
  };
};

struct MixedPrecisionConfig {
  Precision params_dtype = Precision::fp32;
  // Derived: params_dtype, fp32 residual: fp32.
  std::optional<Precision> pipeline_dtype;
  bool grad_reduce_in_fp32 = true;
  bool tf32 = false;

  // fp16 only: the loss is scaled before backward.
  std::optional<double> loss_scale;
  double initial_loss_scale = 4294967296.0;
  double min_loss_scale = 1.0;
  int64_t loss_scale_window = 1000;
  int64_t hysteresis = 2;

  std::optional<Fp8Format> fp8;
  Fp8Recipe fp8_recipe = Fp8Recipe::tensorwise;
  int64_t fp8_margin = 0;
  int64_t fp8_amax_history_len = 1;
  Fp8AmaxAlgo fp8_amax_compute_algo = Fp8AmaxAlgo::most_recent;
  bool fp8_wgrad = true;
  bool fp8_param_gather = false;
  std::optional<Fp4Format> fp4;
  Fp4Recipe fp4_recipe = Fp4Recipe::nvfp4;
  bool fp4_param_gather = false;
  bool first_last_layers_bf16 = false;
  int64_t num_layers_at_start_in_bf16 = 1;
  int64_t num_layers_at_end_in_bf16 = 1;
};

}  // namespace capstan::config
