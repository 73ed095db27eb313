// Adapters in the files of Hugging Face's PEFT: LoRA, rsLoRA and DoRA of linear layers, on the host in fp32,
// under PEFT's names. peft_mapping.hpp maps them to Capstan's names.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/convert.hpp"

namespace capstan::formats {

struct PeftConfig {
  // base_model_name_or_path.
  std::string base_model;
  std::string task = "CAUSAL_LM";
  int64_t rank = 8;
  double alpha = 8, dropout = 0;
  // Scale alpha / sqrt(r) instead of alpha / r.
  bool rank_stabilized = false;
  bool dora = false;
  // The base model stores linear layers as [in, out] (GPT-2).
  bool fan_in_fan_out = false;
  std::vector<std::string> target_modules;
  // target_modules is a regular expression; the tensors' names show its matches.
  bool target_pattern = false;
  // Module names; empty if the key is a regular expression.
  std::vector<std::string> exclude_modules;
  // Indices of the adapted layers; empty: all layers.
  std::vector<int64_t> layers_to_transform;
  // Names before the layer index in a module's name; empty: the last number is the index.
  std::vector<std::string> layers_pattern;
  // Suffixes of module names, or full names after `^`. The first match applies, in the file's order.
  std::vector<std::pair<std::string, int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;

  int64_t rank_of(std::string_view module) const;
  double scale_of(std::string_view module, int64_t module_rank) const;
  // Whether the configuration adapts a module, by its lists of names.
  bool adapts(std::string_view module) const;
};
// Parses an adapter_config.json. Throws ErrorCode::format, or ::unsupported with all unsupported settings.
PeftConfig parse_peft_config(std::string_view text, const std::string& location);
std::string peft_config_text(const PeftConfig& config);

// The adapter of one module: W + scale * B A; with DoRA each row is scaled to its magnitude.
struct AdapterModule {
  // The base model's module name in PEFT files, "decoder.layers.0.mlp.linear_fc1" in Capstan.
  std::string module;
  // In Capstan, where the layer of experts is one module: the index and the number of them. 0: no experts.
  int64_t expert = 0, experts = 0;
  int64_t rank = 0, in = 0, out = 0;
  double scale = 1;
  // [rank, in], [out, rank], [out] or empty.
  std::vector<float> a, b, magnitude;
};

// The content of adapter_config.json and adapter_model.safetensors, with modules ordered by name.
struct PeftAdapter {
  PeftConfig config;
  std::vector<AdapterModule> modules;
};
// Whether the directory has an adapter_config.json.
bool is_peft(const std::filesystem::path& directory);
// Reads an adapter. Throws ErrorCode::not_found, ::format, or ::unsupported for pickles, by name, and for
// tensors that are not LoRA weights of a linear layer.
PeftAdapter read_peft(const std::filesystem::path& directory);
// Writes a new directory, with these files beside the adapter's own. The modules' scales must agree with the
// configuration.
void write_peft(const std::filesystem::path& directory, const PeftAdapter& adapter,
                const Assets& assets = {});

}  // namespace capstan::formats
