// Architectures of GGUF files ↔ the model section and the names of tensors.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/sections/model.hpp"
#include "formats/gguf_file.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::formats {

inline constexpr std::string_view kRopeFactors = "rope_freqs.weight";

// The model section of a GGUF file, including derived values.
struct GgufModel {
  std::string architecture;
  config::ModelConfig model;
  TensorNames names;
};
// Reads the model section from a file's metadata. Throws ErrorCode::unsupported for unknown architectures.
GgufModel read_gguf_model(GgufFile& file);

// The GGUF architecture for exactly a given model, and its metadata ("llama.context_length" …).
struct GgufPlan {
  std::string architecture;
  TensorNames names;
  std::vector<std::pair<std::string, GgufValue>> metadata;
  // Values of the tensor rope_freqs.weight; empty: none.
  std::vector<float> rope_factors;
};
// Throws ErrorCode::unsupported, with the fields that differ, if no architecture supports the model.
GgufPlan plan_gguf(const config::ModelConfig& model);

// The wavelength factors of Llama 3.1's RoPE scaling, one per pair.
std::vector<float> llama3_factors(const config::ModelConfig& model);

}  // namespace capstan::formats
