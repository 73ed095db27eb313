// Adapters: train few added parameters beside frozen weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/sections/common.hpp"

namespace capstan::config {

enum class PeftScheme : uint8_t { lora, dora, canonical_lora };
enum class DropoutPosition : uint8_t { pre, post };
enum class LoraInit : uint8_t { xavier, kaiming, normal, zero };

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
