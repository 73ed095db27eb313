// Architectures of GGUF files ↔ the model section and the names of tensors.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/sections/model.hpp"
#include "formats/gguf_file.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::interchange {

inline constexpr std::string_view kRopeFactors = "rope_freqs.weight";

// The architecture of the file, as ErrorCode::unsupported where this version lacks it, and the model; with its derived values.
struct GgufModel {
  std::string architecture;
  config::ModelConfig model;
  TensorNames names;
};
GgufModel read_gguf_model(GgufFile& file);

// The architecture that computes exactly this and its metadata ("llama.context_length" …); ErrorCode::unsupported with what
// none does.
struct GgufPlan {
  std::string architecture;
  TensorNames names;
  std::vector<std::pair<std::string, GgufValue>> metadata;
  std::vector<float> rope_factors;  // of the tensor rope_freqs.weight; empty: none
};
GgufPlan plan_gguf(const config::ModelConfig& model);

// What the wavelengths of Llama 3.1's scaling are multiplied by, one for each pair.
std::vector<float> llama3_factors(const config::ModelConfig& model);

}  // namespace capstan::interchange
