// Adapters in the files of Hugging Face's PEFT: LoRA, rsLoRA and DoRA of linear layers, on the host and in fp32. Under PEFT's
// names here; peft_mapping.hpp turns them into Capstan's.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace capstan::interchange {

struct PeftConfig {
  std::string base_model;  // what the adapter is for, as written
  std::string task = "CAUSAL_LM";
  int64_t rank = 8;
  double alpha = 8, dropout = 0;
  bool rank_stabilised = false;  // scale alpha / sqrt(r) instead of alpha / r
  bool dora = false;
  bool fan_in_fan_out = false;  // the base stores [in, out] (GPT-2)
  std::vector<std::string> target_modules;
  bool target_pattern =
      false;  // target_modules is one expression, of which the tensors' names tell the outcome
  std::vector<std::string> exclude_modules;  // empty where that is an expression
  std::vector<int64_t> layers_to_transform;  // empty: all
  // Ends of module names, or with `^` before them whole ones. The first that fits a module counts, in the file's order.
  std::vector<std::pair<std::string, int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;

  int64_t rank_of(std::string_view module) const;
  double scale_of(std::string_view module, int64_t module_rank) const;
  bool adapts(std::string_view module) const;  // as far as lists of names tell
};
// ErrorCode::format, ::unsupported with everything that would not be computed as the file says.
PeftConfig parse_peft_config(std::string_view text, const std::string& place);
std::string peft_config_text(const PeftConfig& config);

// The adapter of one module: W + scale * B A, with a magnitude each row scaled to its length.
struct AdapterModule {
  std::string
      module;  // in PEFT's files of the base's own names; in Capstan "decoder.layers.0.mlp.linear_fc1"
  int64_t rank = 0, in = 0, out = 0;
  double scale = 1;
  std::vector<float> a, b, magnitude;  // [rank, in], [out, rank], [out] or empty
};

// adapter_config.json and adapter_model.safetensors of a directory, modules by name.
struct PeftAdapter {
  PeftConfig config;
  std::vector<AdapterModule> modules;
};
bool is_peft(const std::filesystem::path& directory);  // has an adapter_config.json
// ErrorCode::not_found, ::format; ::unsupported for pickles, by name, and for tensors that are no LoRA of a linear layer.
PeftAdapter read_peft(const std::filesystem::path& directory);
// Into a directory that does not exist yet. Scales must be what the configuration gives.
void write_peft(const std::filesystem::path& directory, const PeftAdapter& adapter);

}  // namespace capstan::interchange
