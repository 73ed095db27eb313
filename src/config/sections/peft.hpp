// Adapters: train few added parameters beside frozen weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/core/types.hpp"
#include "config/sections/common.hpp"

namespace capstan::config {

enum class PeftScheme : uint8_t { lora, dora, canonical_lora, canonical_dora };
enum class BaseQuantization : uint8_t { none, nf4 };
enum class DropoutPosition : uint8_t { pre, post };
enum class LoraInit : uint8_t { xavier, kaiming, normal, zero };

template <>
struct EnumNames<PeftScheme> {
  static constexpr EnumEntry<PeftScheme> list[] = {
      {PeftScheme::lora, "lora", "W + alpha/dim * B A"},
      {PeftScheme::dora, "dora", "LoRA with a learned magnitude per output row"},
      {PeftScheme::canonical_lora, "canonical_lora", "LoRA with separate adapters for q, k, v, gate and up"},
      {PeftScheme::canonical_dora, "canonical_dora", "DoRA with separate adapters for q, k, v, gate and up"},
  };
};

template <>
struct EnumNames<BaseQuantization> {
  static constexpr EnumEntry<BaseQuantization> list[] = {
      {BaseQuantization::none, "none", "not quantized"},
      {BaseQuantization::nf4, "nf4", "4-bit NormalFloat with a scale per block (QLoRA)"},
  };
};

template <>
struct EnumNames<DropoutPosition> {
  static constexpr EnumEntry<DropoutPosition> list[] = {
      {DropoutPosition::pre, "pre", "before A"},
      {DropoutPosition::post, "post", "after B"},
  };
};

template <>
struct EnumNames<LoraInit> {
  static constexpr EnumEntry<LoraInit> list[] = {
      {LoraInit::xavier, "xavier", "Xavier uniform"},
      {LoraInit::kaiming, "kaiming", "Kaiming uniform"},
      {LoraInit::normal, "normal", "normal with standard deviation 0.02"},
      {LoraInit::zero, "zero", "zeros"},
  };
};

// Adapters of q, k, v, gate and up instead of one for the fused layer.
constexpr bool adapts_parts(PeftScheme scheme) {
  return scheme == PeftScheme::canonical_lora || scheme == PeftScheme::canonical_dora;
}
constexpr bool has_magnitudes(PeftScheme scheme) {
  return scheme == PeftScheme::dora || scheme == PeftScheme::canonical_dora;
}

struct PeftConfig {
  PeftScheme scheme = PeftScheme::lora;
  std::vector<std::string> target_modules = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"};
  std::vector<std::string> exclude_modules;
  int64_t dim = 32;
  double alpha = 32.0;
  bool use_rslora = false;
  std::optional<double> lora_plus_ratio;
  double dropout = 0.0;
  DropoutPosition dropout_position = DropoutPosition::pre;
  LoraInit lora_a_init = LoraInit::xavier;
  LoraInit lora_b_init = LoraInit::zero;
  // Derived: mixed_precision.params_dtype.
  std::optional<Precision> lora_dtype;
  bool random_base = false;
  BaseQuantization base_quantization = BaseQuantization::none;
  int64_t quantization_block = 64;
  bool quantization_double = true;
  std::optional<Path> adapter;
};

}  // namespace capstan::config
