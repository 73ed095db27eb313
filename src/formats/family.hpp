// A model family of Hugging Face Transformers: the mapping of its config.json and tensors to Capstan's. Each
// family is one file of families/.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"
#include "config/sections/model.hpp"
#include "formats/config_json.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::formats {

// The keys for rotary positions at the top of config.json. In `rope_parameters` all families have rope_theta
// and partial_rotary_factor.
struct RopeKeys {
  const char* base = "rope_theta";
  double class_base = 10000.0;
  const char* fraction = "partial_rotary_factor";
  double class_fraction = 1;
  // The class rotates the fraction of a head; false: all of it.
  bool partial = false;
  // Default of original_max_position_embeddings in RoPE scaling.
  std::optional<int64_t> original_positions = {};
};

// Sizes, norms, activation, biases, positions and tied heads under the names that all but GPT-2 use.
struct LlamaLike {
  // Default of `tie_word_embeddings`.
  bool tied = false;
  // The class supports `attention_bias`, which adds biases to all four projections.
  bool attention_bias = false;
  // The class supports `mlp_bias`.
  bool mlp_bias = false;
  const char* activation = "hidden_act";
  const char* function = "silu";
  double epsilon = 1e-6;
  // Class defaults for missing keys; nullopt: the number of heads, and width / heads.
  std::optional<int64_t> groups = {}, head = {};
  RopeKeys rope = {};
  // Read and write the widths of latent attention in place of `head_dim`; nullptr: other attention.
  void (*read_heads)(ConfigJson& json, config::ModelConfig& model) = nullptr;
  void (*write_heads)(const config::ModelConfig& model, OrderedJson& json) = nullptr;
};
struct Family {
  // `model_type` of config.json.
  const char* model_type;
  // Name of the Transformers class with the language-model head.
  const char* architecture;
  // The keys that the family shares with Llama; nullopt: none.
  std::optional<LlamaLike> like;
  // Reads the other keys of config.json, but sets no derived fields; nullptr: there are none. Refuses
  // unsupported keys by name.
  void (*read_rest)(ConfigJson& json, config::ModelConfig& model) = nullptr;
  // Writes the keys that `read_rest` reads and omits what the family cannot express; the caller reads the
  // result back and compares. nullptr: none.
  void (*write_rest)(const config::ModelConfig& model, OrderedJson& json) = nullptr;
  TensorNames names;
  // A prefix of tensor names that some files omit (the first GPT-2's); empty: never omitted.
  const char* prefix = "";
  // Files may hold layers after the last one, for multi-token prediction, which the class does not run.
  bool has_prediction_layers = false;

  void read(ConfigJson& json, config::ModelConfig& model) const;
  void write(const config::ModelConfig& model, OrderedJson& json) const;
  TensorNames bare_names() const;
  bool has_latent_attention() const { return like && like->read_heads; }
};

// All families, in the order in which they are tried for a model from a recipe.
std::span<const Family* const> all_families();
// Returns nullptr if there is no such family.
const Family* find_family(std::string_view model_type);

// ---- shared by the families (families/common.cpp) ----

// The key of config.json for the number of layers of multi-token prediction.
inline constexpr const char* kPredictionLayers = "num_nextn_predict_layers";
// The largest model.mtp_num_layers.
inline constexpr int64_t kMaxPredictionLayers = 64;

// Upper bounds for sizes from untrusted files, because tables grow with them.
inline constexpr int64_t kMaxLayers = 1 << 13, kMaxHeads = 1 << 16, kMaxExperts = 1 << 12;

// The default of the Transformers class where config.json lacks the key; null selects `off`.
template <class T>
T of_class(const ConfigJson& json, const char* key, std::optional<T> otherwise, T off) {
  return otherwise && json.missing(key) ? *otherwise : off;
}
// Erases `head_dim` where it is what the Transformers class computes without it.
void omit_implied_head_dim(const config::ModelConfig& model, OrderedJson& json);

// Reads `sliding_window`; returns nullopt for null.
std::optional<int64_t> read_window(ConfigJson& json, std::optional<int64_t> of_the_class);

// Reads which layers use sliding-window attention. window: size in tokens, if some layer has one. types: one
// word for each layer. Refuses a pattern other than full attention in every n-th layer.
void read_layer_types(ConfigJson& json, config::ModelConfig& model, std::optional<int64_t> window,
                      std::vector<std::string> types);
void write_layer_types(const config::ModelConfig& model, OrderedJson& json);

// Sets model.position_embedding_type; model.kv_channels and max_position_embeddings are set.
void read_rope(ConfigJson& json, config::ModelConfig& model, const RopeKeys& keys);
void write_rope(const config::ModelConfig& model, OrderedJson& json, const RopeKeys& keys);

void read_activation(ConfigJson& json, config::ModelConfig& model, const char* key, const char* otherwise);
// The name in config.json, such as "silu" or "gelu_pytorch_tanh".
const char* activation_name(const config::ModelConfig& model);

TensorNames llama_names();

}  // namespace capstan::formats
