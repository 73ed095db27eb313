// Adapters: train few added parameters beside frozen weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/sections/common.hpp"
#include "config/types.hpp"

namespace capstan::config {

enum class PeftScheme : uint8_t { lora, dora, canonical_lora };
enum class DropoutPosition : uint8_t { pre, post };
enum class LoraInit : uint8_t { xavier, kaiming, normal, zero };

template <>
struct EnumNames<PeftScheme> {
  static constexpr EnumEntry<PeftScheme> list[] = {
      {PeftScheme::lora, "lora", "W + alpha/dim * B A"},
      {PeftScheme::dora, "dora", "LoRA with a trained magnitude for each output row"},
      {PeftScheme::canonical_lora, "canonical_lora",
       "LoRA with an adapter of its own for each of q, k, v, gate and up"},
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

struct PeftConfig {
  PeftScheme scheme = PeftScheme::lora;
  std::vector<std::string> target_modules = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"};
  std::vector<std::string> exclude_modules;
  int64_t dim = 32;     // rank of the update
  double alpha = 32.0;  // the update is scaled by alpha / dim
  double dropout = 0.0;
  DropoutPosition dropout_position = DropoutPosition::pre;
  LoraInit lora_a_init = LoraInit::xavier;  // field lora_A_init
  LoraInit lora_b_init = LoraInit::zero;    // field lora_B_init
  std::optional<Precision> lora_dtype;      // derived: mixed_precision.params_dtype
};

}  // namespace capstan::config
