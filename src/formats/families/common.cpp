#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/sections/rotary.hpp"
#include "formats/family.hpp"

namespace capstan::formats {

using config::Activation;
using config::ModelConfig;
using config::RopeScaling;

namespace {

// Reads rope_type and its parameters from rope_scaling or rope_parameters.
void read_scaling(ConfigJson& c, ModelConfig& m, ConfigJson& top, std::optional<int64_t> original_positions) {
  std::string type = c.text("rope_type", c.text("type", "default"));
  // The first Phi-3 files use this name.
  if (type == "su") type = "longrope";
  if (type == "default") return;
  m.rope_scaling = true;
  const char* const kOriginal = "original_max_position_embeddings";
  const auto original = [&](int64_t otherwise) {
    const int64_t above = top.integer(kOriginal, original_positions.value_or(otherwise));
    m.rope_scaling_original_max_position_embeddings = c.integer(kOriginal, above);
    if ((top.has(kOriginal) || original_positions) &&
        m.rope_scaling_original_max_position_embeddings != above)
      top.refuse("`" + std::string(kOriginal) + "` and that of rope's scaling differ");
  };
  const auto factor = [&](double otherwise) {
    m.rope_scaling_factor = c.number("factor", otherwise);
    if (!(m.rope_scaling_factor >= 1))
      c.refuse("rope's `factor` is " + to_text(m.rope_scaling_factor) + ", below 1");
  };
  const int64_t positions = *m.max_position_embeddings;
  if (type == "linear") {
    m.rope_scaling_type = RopeScaling::linear;
    factor(1);
  } else if (type == "llama3") {
    m.rope_scaling_type = RopeScaling::llama3;
    factor(8);
    m.rope_scaling_low_freq_factor = c.number("low_freq_factor");
    m.rope_scaling_high_freq_factor = c.number("high_freq_factor");
    if (!(m.rope_scaling_low_freq_factor > 0) ||
        !(m.rope_scaling_high_freq_factor > m.rope_scaling_low_freq_factor))
      c.refuse("rope's `low_freq_factor` and `high_freq_factor` are not ascending numbers above 0");
    original(positions);
  } else if (type == "yarn") {
    m.rope_scaling_type = RopeScaling::yarn;
    original(positions);
    factor(static_cast<double>(positions) /
           static_cast<double>(m.rope_scaling_original_max_position_embeddings));
    m.rope_scaling_beta_fast = c.number("beta_fast", 32);
    m.rope_scaling_beta_slow = c.number("beta_slow", 1);
    m.rope_scaling_truncate = c.boolean("truncate", true);
    if (c.has("attention_factor")) m.rope_scaling_attention_factor = c.number("attention_factor");
    const double scale = c.number("mscale", 0), all = c.number("mscale_all_dim", 0);
    if (m.multi_latent_attention) {
      // They also change the softmax scale.
      if (scale != 0) m.rope_scaling_mscale = scale;
      if (all != 0) m.rope_scaling_mscale_all_dim = all;
    } else if (scale != 0 && all != 0 && !m.rope_scaling_attention_factor) {
      m.rope_scaling_attention_factor =
          config::yarn_mscale(m.rope_scaling_factor, scale) / config::yarn_mscale(m.rope_scaling_factor, all);
    }
  } else if (type == "longrope") {
    m.rope_scaling_type = RopeScaling::longrope;
    original(positions);
    factor(static_cast<double>(positions) /
           static_cast<double>(m.rope_scaling_original_max_position_embeddings));
    if (c.has("attention_factor")) m.rope_scaling_attention_factor = c.number("attention_factor");
    m.rope_scaling_short_factors = c.numbers("short_factor");
    m.rope_scaling_long_factors = c.numbers("long_factor");
    const auto pairs = static_cast<size_t>(config::rotary_width(m) / 2);
    for (const auto* list : {&m.rope_scaling_short_factors, &m.rope_scaling_long_factors}) {
      if (list->size() != pairs)
        c.refuse("RoPE scaling has " + std::to_string(list->size()) + " factors, but a head has " +
                 std::to_string(pairs) + " rotated pairs");
      for (const double value : *list)
        if (!(value > 0)) c.refuse("one of rope's factors is " + to_text(value) + ", not above 0");
    }
  } else {
    // Parameters of a type that has just been refused.
    c.changes_nothing({"factor", kOriginal});
    c.refuse("`rope_type` is " + in_quotes(type) +
             ", which Capstan does not support (it has default, linear, llama3, yarn, longrope)");
  }
}

// Converts the fraction to an integer number of head elements, rounded down as in Transformers.
void settle_rotary_percent(ConfigJson& c, ModelConfig& m, const std::string& key) {
  if (!(m.rotary_percent > 0) || m.rotary_percent > 1)
    return c.refuse("`" + key + "` is " + to_text(m.rotary_percent) + ", not in (0, 1]");
  const auto head = static_cast<double>(*m.kv_channels), rotated = std::floor(head * m.rotary_percent);
  if (m.rotary_percent == 1 && std::fmod(head, 2) != 0)
    return c.refuse("`head_dim` is " + to_text(head) + ", and RoPE rotates pairs of elements");
  if (rotated < 2 || std::fmod(rotated, 2) != 0)
    c.refuse("`" + key + "` rotates " + to_text(rotated) + " elements of a head, which are not pairs");
  m.rotary_percent = rotated / head;
}

}  // namespace

// Transformers 4 has rope_theta and rope_scaling; Transformers 5 has both in rope_parameters.
void read_rope(ConfigJson& c, ModelConfig& m, const RopeKeys& keys) {
  m.position_embedding_type = config::PositionEmbedding::rope;
  const Json& parameters = c.value("rope_parameters");
  const Json& scaling = c.value("rope_scaling");
  m.rotary_base = c.number(keys.base, keys.class_base);
  m.rotary_percent = c.number(keys.fraction, keys.class_fraction);
  if (!parameters.is_null() && !scaling.is_null() && scaling != parameters)
    c.refuse("`rope_scaling` and `rope_parameters` differ");
  const bool is_old = parameters.is_null();
  const Json& given = is_old ? scaling : parameters;
  const std::string name = is_old ? "rope_scaling" : "rope_parameters";
  std::optional<ConfigJson> inner;
  if (!given.is_null()) inner.emplace(given, c.location() + ": " + name);
  // Each key may be in the inner object, at the top, or, in edited files, in both.
  const auto take = [&](const char* key, const char* inner_key, double& value) {
    if (!inner) return;
    const double here = inner->number(inner_key, value);
    if (c.has(key) && here != value) c.refuse("`" + std::string(key) + "` and that of `" + name + "` differ");
    value = here;
  };
  take(keys.base, "rope_theta", m.rotary_base);
  take(keys.fraction, "partial_rotary_factor", m.rotary_percent);
  if (!m.multi_latent_attention) settle_rotary_percent(c, m, keys.fraction);
  if (inner) read_scaling(*inner, m, c, keys.original_positions), inner->finish();
  if (!keys.partial && m.rotary_percent != 1)
    c.refuse("`partial_rotary_factor` is " + to_text(m.rotary_percent) +
             ": the classes of this family rotate all elements of a head (Phi-3 has the key)");
  if (!m.rope_scaling) c.changes_nothing({"original_max_position_embeddings"});
  if (!(m.rotary_base > 1))
    c.refuse("`" + std::string(keys.base) + "` is " + to_text(m.rotary_base) + ", not above 1");
  c.only("rope_interleaved", false, "pairs of neighbors are another model");
}

void write_rope(const ModelConfig& m, OrderedJson& j, const RopeKeys& keys) {
  j[keys.base] = m.rotary_base;
  if (keys.partial && m.rotary_percent != keys.class_fraction) {
    // Readers truncate fraction * width to an integer; 88 * (60 / 88.) is 59.999…
    double fraction = m.rotary_percent;
    while (std::floor(fraction * static_cast<double>(*m.kv_channels)) <
           static_cast<double>(config::rotary_width(m)))
      fraction = std::nextafter(fraction, 1.0);
    j[keys.fraction] = fraction;
  }
  j["rope_scaling"] = nullptr;
  if (!m.rope_scaling) return;
  OrderedJson s;
  s["rope_type"] = std::string(config::enum_name(m.rope_scaling_type));
  s["factor"] = m.rope_scaling_factor;
  switch (m.rope_scaling_type) {
    case RopeScaling::linear:
      break;
    case RopeScaling::llama3:
      s["low_freq_factor"] = m.rope_scaling_low_freq_factor;
      s["high_freq_factor"] = m.rope_scaling_high_freq_factor;
      break;
    case RopeScaling::yarn:
      s["beta_fast"] = m.rope_scaling_beta_fast;
      s["beta_slow"] = m.rope_scaling_beta_slow;
      s["truncate"] = m.rope_scaling_truncate;
      if (m.rope_scaling_mscale) s["mscale"] = *m.rope_scaling_mscale;
      if (m.rope_scaling_mscale_all_dim) s["mscale_all_dim"] = *m.rope_scaling_mscale_all_dim;
      break;
    case RopeScaling::longrope:
      s["short_factor"] = m.rope_scaling_short_factors;
      s["long_factor"] = m.rope_scaling_long_factors;
      break;
  }
  if (m.rope_scaling_attention_factor) s["attention_factor"] = *m.rope_scaling_attention_factor;
  if (m.rope_scaling_type != RopeScaling::linear)
    s["original_max_position_embeddings"] = m.rope_scaling_original_max_position_embeddings;
  j["rope_scaling"] = s;
}

namespace {

struct ActivationName {
  const char* name;
  Activation function;
};
constexpr ActivationName kActivations[] = {
    {"silu", Activation::silu},          {"swish", Activation::silu},
    {"gelu", Activation::gelu},          {"gelu_pytorch_tanh", Activation::gelu_tanh},
    {"gelu_new", Activation::gelu_tanh}, {"quick_gelu", Activation::quick_gelu},
    {"relu", Activation::relu},          {"relu2", Activation::squared_relu}};

}  // namespace

void read_activation(ConfigJson& c, ModelConfig& m, const char* key, const char* otherwise) {
  const std::string name = c.text(key, otherwise);
  for (const ActivationName& one : kActivations)
    if (name == one.name) {
      m.activation_func = one.function;
      return;
    }
  c.refuse("`" + std::string(key) + "` is " + in_quotes(name) +
           ", an activation that Capstan does not support");
}

const char* activation_name(const ModelConfig& m) {
  for (const ActivationName& one : kActivations)
    if (m.activation_func == one.function) return one.name;
  fail(ErrorCode::internal, "an activation without a name");
}

static void read_llama_like(ConfigJson& c, ModelConfig& m, const LlamaLike& how) {
  m.num_layers = c.integer("num_hidden_layers", {}, kMaxLayers);
  m.hidden_size = c.integer("hidden_size");
  m.num_attention_heads = c.integer("num_attention_heads", {}, kMaxHeads);
  m.num_query_groups =
      c.integer("num_key_value_heads", of_class(c, "num_key_value_heads", how.groups, m.num_attention_heads));
  if (m.num_attention_heads % *m.num_query_groups != 0)
    fail(ErrorCode::format,
         c.location() + ": `num_attention_heads` (" + std::to_string(m.num_attention_heads) +
             ") is not a multiple of `num_key_value_heads` (" + std::to_string(*m.num_query_groups) + ")");
  if (how.read_heads) {
    how.read_heads(c, m);
  } else if (how.head && c.missing("head_dim")) {
    m.kv_channels = *how.head;
  } else {
    if (!c.has("head_dim") && m.hidden_size % m.num_attention_heads != 0)
      fail(ErrorCode::format, c.location() + ": `hidden_size` (" + std::to_string(m.hidden_size) +
                                  ") is not a multiple of `num_attention_heads` (" +
                                  std::to_string(m.num_attention_heads) + "), and there is no `head_dim`");
    m.kv_channels = c.integer("head_dim", m.hidden_size / m.num_attention_heads);
  }
  m.ffn_hidden_size = c.integer("intermediate_size");
  m.vocab_size = c.integer("vocab_size");
  m.max_position_embeddings = c.integer("max_position_embeddings");
  m.normalization = config::Normalization::rms_norm;
  m.layernorm_epsilon = c.number("rms_norm_eps", how.epsilon);
  m.gated_linear_unit = true;
  read_activation(c, m, how.activation, how.function);
  m.add_bias_linear = false;
  if (how.attention_bias) {
    m.add_qkv_bias = c.boolean("attention_bias", false);
    m.add_attention_output_bias = m.add_qkv_bias;
  }
  if (how.mlp_bias) m.add_mlp_bias = c.boolean("mlp_bias", false);
  m.share_embeddings_and_output_weights = c.boolean("tie_word_embeddings", how.tied);
  m.hidden_dropout = 0;
  m.attention_dropout = c.number("attention_dropout", 0);
  m.init_method_std = c.number("initializer_range", 0.02);
  read_rope(c, m, how.rope);
}

void omit_implied_head_dim(const ModelConfig& m, OrderedJson& j) {
  if (*m.kv_channels * m.num_attention_heads == m.hidden_size) j.erase("head_dim");
}

std::optional<int64_t> read_window(ConfigJson& c, std::optional<int64_t> of_the_class) {
  if (c.missing("sliding_window")) return of_the_class;
  const int64_t tokens = c.integer("sliding_window", 1 << 30);
  return c.has("sliding_window") ? std::optional(tokens) : std::nullopt;
}

static void write_llama_like(const ModelConfig& m, OrderedJson& j, const LlamaLike& how) {
  j["num_hidden_layers"] = m.num_layers;
  j["hidden_size"] = m.hidden_size;
  j["num_attention_heads"] = m.num_attention_heads;
  j["num_key_value_heads"] = *m.num_query_groups;
  if (how.write_heads)
    how.write_heads(m, j);
  else
    j["head_dim"] = *m.kv_channels;
  j["intermediate_size"] = *m.ffn_hidden_size;
  j["vocab_size"] = m.vocab_size;
  j["max_position_embeddings"] = *m.max_position_embeddings;
  j["rms_norm_eps"] = m.layernorm_epsilon;
  j[how.activation] = activation_name(m);
  if (how.attention_bias) j["attention_bias"] = m.add_qkv_bias;
  if (how.mlp_bias) j["mlp_bias"] = *m.add_mlp_bias;
  j["tie_word_embeddings"] = m.share_embeddings_and_output_weights;
  j["attention_dropout"] = m.attention_dropout;
  j["initializer_range"] = m.init_method_std;
  write_rope(m, j, how.rope);
}

void read_layer_types(ConfigJson& c, ModelConfig& m, std::optional<int64_t> window,
                      std::vector<std::string> types) {
  if (types.size() != static_cast<size_t>(m.num_layers)) {
    c.refuse("`layer_types` names " + std::to_string(types.size()) + " layers of " +
             std::to_string(m.num_layers));
    return;
  }
  // Layers with full attention, from 1.
  std::vector<int64_t> seeing_all;
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "full_attention")
      seeing_all.push_back(static_cast<int64_t>(i) + 1);
    else if (types[i] != "sliding_attention")
      return c.refuse("`layer_types` has " + in_quotes(types[i]));
  }
  if (static_cast<int64_t>(seeing_all.size()) == m.num_layers) return;
  if (!window) return c.refuse("`layer_types` has sliding layers, and there is no `sliding_window`");
  m.window_size = window;
  if (seeing_all.empty()) return;
  const int64_t every = seeing_all.front();
  for (int64_t layer = 1; layer <= m.num_layers; ++layer) {
    const bool all = types[static_cast<size_t>(layer - 1)] == "full_attention";
    if (all != (layer % every == 0))
      return c.refuse("`layer_types` does not give full attention to every n-th layer");
  }
  m.window_attn_skip_freq = every;
}

void write_layer_types(const ModelConfig& m, OrderedJson& j) {
  std::vector<std::string> types;
  for (int64_t layer = 1; layer <= m.num_layers; ++layer) {
    const bool all = !m.window_size || (m.window_attn_skip_freq && layer % *m.window_attn_skip_freq == 0);
    types.push_back(all ? "full_attention" : "sliding_attention");
  }
  j["layer_types"] = types;
}

void Family::read(ConfigJson& json, ModelConfig& model) const {
  if (like) read_llama_like(json, model, *like);
  if (read_rest) read_rest(json, model);
}

void Family::write(const ModelConfig& model, OrderedJson& json) const {
  if (like) write_llama_like(model, json, *like);
  if (write_rest) write_rest(model, json);
}

TensorNames Family::bare_names() const {
  TensorNames bare = names;
  const std::string first = prefix;
  for (std::string* name : {&bare.embedding, &bare.positions, &bare.final_norm, &bare.layer})
    if (name->starts_with(first)) name->erase(0, first.size());
  return bare;
}

TensorNames llama_names() {
  TensorNames n;
  n.embedding = "model.embed_tokens";
  n.final_norm = "model.norm";
  n.head = "lm_head";
  n.layer = "model.layers.{}.";
  n.input_norm = "input_layernorm";
  n.mlp_norm = "post_attention_layernorm";
  n.q = "self_attn.q_proj";
  n.k = "self_attn.k_proj";
  n.v = "self_attn.v_proj";
  n.output = "self_attn.o_proj";
  n.gate = "mlp.gate_proj";
  n.up = "mlp.up_proj";
  n.down = "mlp.down_proj";
  return n;
}

std::span<const Family* const> all_families() {
  extern const Family kLlama, kQwen2, kQwen3, kMistral, kMixtral, kQwen2Moe, kQwen3Moe, kOlmo2, kOlmoe,
      kGemma2, kPhi3, kGpt2, kDeepseekV2, kDeepseekV3, kKimiK2, kGptOss, kGptNeox;
  static const Family* const families[] = {
      &kLlama,  &kQwen2, &kQwen3, &kMistral,    &kMixtral,    &kQwen2Moe, &kQwen3Moe, &kOlmo2,  &kOlmoe,
      &kGemma2, &kPhi3,  &kGpt2,  &kDeepseekV3, &kDeepseekV2, &kKimiK2,   &kGptOss,   &kGptNeox};
  return families;
}

const Family* find_family(std::string_view model_type) {
  for (const Family* family : all_families())
    if (family->model_type == model_type) return family;
  return nullptr;
}

}  // namespace capstan::formats
