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
      {PeftScheme::dora, "dora", "LoRA with a trained magnitude for each output row"},
      {PeftScheme::canonical_lora, "canonical_lora",
       "LoRA with an adapter of its own for each of q, k, v, gate and up"},
      {PeftScheme::canonical_dora, "canonical_dora",
       "DoRA with an adapter of its own for each of q, k, v, gate and up"},
  };
};

template <>
struct EnumNames<BaseQuantization> {
  static constexpr EnumEntry<BaseQuantization> list[] = {
      {BaseQuantization::none, "none", "as they are"},
      {BaseQuantization::nf4, "nf4", "4 bits of 16 normal quantiles, with a scale for each block (QLoRA)"},
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
  int64_t dim = 32;                       // rank of the update
  double alpha = 32.0;                    // the update is scaled by alpha / dim
  bool use_rslora = false;                // by alpha / sqrt(dim) instead
  std::optional<double> lora_plus_ratio;  // LoRA+: learning rate of B over that of A; null: the same
  double dropout = 0.0;
  DropoutPosition dropout_position = DropoutPosition::pre;
  LoraInit lora_a_init = LoraInit::xavier;  // field lora_A_init
  LoraInit lora_b_init = LoraInit::zero;    // field lora_B_init
  std::optional<Precision> lora_dtype;      // derived: mixed_precision.params_dtype
  bool random_base = false;                 // beside first values instead of trained weights
  // The frozen weights of the layers' linear maps, with an adapter or not.
  BaseQuantization base_quantization = BaseQuantization::none;
  int64_t quantization_block = 64;  // elements with one scale
  bool quantization_double = true;  // the scales are quantized too, in blocks of 256
  std::optional<Path> adapter;      // a directory in PEFT's format, or a checkpoint of a run with adapters
};

}  // namespace capstan::config
