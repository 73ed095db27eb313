// A family of models of Hugging Face Transformers: how its config.json and its tensors correspond to Capstan's. One file of
// families/ each. Included only by .cpp files (nlohmann/json is heavy).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/sections/model.hpp"
#include "formats/config_json.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::interchange {

struct Family {
  const char* model_type;    // of config.json
  const char* architecture;  // the class that has the head
  // The architecture that a config.json describes; what the engine derives is left open. Refuses by name.
  void (*read)(ConfigJson& json, config::ModelConfig& model);
  // Writes the keys that `read` reads. What the family cannot say is left out: whoever calls reads it back and compares.
  void (*write)(const config::ModelConfig& model, nlohmann::ordered_json& json);
  TensorNames names;
  // Some files leave it out (the first GPT-2's); empty: it is always there.
  const char* prefix;
  TensorNames bare_names() const;
};

// In the order in which they are tried for a model that comes from a recipe.
std::span<const Family* const> all_families();
const Family* find_family(std::string_view model_type);  // nullptr: none

// ---- what the families share (families/common.cpp) ----

// No model has more; tables grow with them, and a file may say anything.
inline constexpr int64_t kMostLayers = 1 << 13, kMostHeads = 1 << 16;

// What the class of Transformers takes where config.json lacks the key; a key that is null says `off`.
template <class T>
T of_class(const ConfigJson& json, const char* key, std::optional<T> otherwise, T off) {
  return otherwise && json.missing(key) ? *otherwise : off;
}
// The window; nullopt: null.
std::optional<int64_t> read_window(ConfigJson& json, std::optional<int64_t> of_the_class);

// Sizes, norms, activation, biases, positions and tied heads under the names that all but GPT-2 use.
struct LlamaLike {
  bool tied = false;            // where config.json does not say
  bool attention_bias = false;  // the class knows `attention_bias`, of all four projections
  bool mlp_bias = false;        // the class knows `mlp_bias`
  const char* activation = "hidden_act";
  const char* function = "silu";
  double epsilon = 1e-6;
  // Where the class has numbers of its own for missing keys; null says as many as heads, and width / heads.
  std::optional<int64_t> groups = {}, head = {};
  std::optional<int64_t> original_positions = {};  // of RoPE's scaling
  bool partial_rotary =
      false;  // the class knows `partial_rotary_factor`; others ignore it, or fail at scaled positions
};
void read_llama_like(ConfigJson& json, config::ModelConfig& model, const LlamaLike& how);
void write_llama_like(const config::ModelConfig& model, nlohmann::ordered_json& json, const LlamaLike& how);

// window: tokens, where some layer has one. types: a word for each layer; without them every layer has the window from
// first_layer on. Refuses a pattern that is not "every n-th layer sees all".
void read_layer_types(ConfigJson& json, config::ModelConfig& model, std::optional<int64_t> window,
                      std::vector<std::string> types);
void write_layer_types(const config::ModelConfig& model, nlohmann::ordered_json& json);

void read_activation(ConfigJson& json, config::ModelConfig& model, const char* key, const char* otherwise);
const char* activation_name(const config::ModelConfig& model);  // "silu", "gelu_pytorch_tanh" …

TensorNames llama_names();

}  // namespace capstan::interchange
