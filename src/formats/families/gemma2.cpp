// Gemma 2: norms before and after, gamma - 1 on disk, capped scores and logits, a window on every other
// layer, the first one included.
#include <cmath>

#include "formats/family.hpp"

namespace capstan::formats {

static void read_gemma2(ConfigJson& c, config::ModelConfig& m) {
  // Early files have this key; the model class ignores it.
  c.changes_nothing({"hidden_act"});
  m.norm_placement = config::NormPlacement::both;
  m.layernorm_zero_centered_gamma = true;
  m.embedding_multiplier = std::sqrt(static_cast<double>(m.hidden_size));
  m.softmax_scale = 1 / std::sqrt(c.number("query_pre_attn_scalar", 256));
  if (!std::isfinite(*m.softmax_scale)) c.refuse("`query_pre_attn_scalar` is not above 0");
  const auto cap = [&](const char* key, double otherwise) -> std::optional<double> {
    const double value = c.number(key, otherwise);
    return c.has(key) || c.missing(key) ? std::optional(value) : std::nullopt;
  };
  m.attn_logit_softcapping = cap("attn_logit_softcapping", 50);
  m.final_logit_softcapping = cap("final_logit_softcapping", 30);
  std::vector<std::string> types = c.texts("layer_types");
  if (types.empty())
    for (int64_t layer = 0; layer < m.num_layers; ++layer)
      types.emplace_back(layer % 2 == 0 ? "sliding_attention" : "full_attention");
  read_layer_types(c, m, read_window(c, 4096), std::move(types));
  c.changes_nothing({"cache_implementation"});
}

static void write_gemma2(const config::ModelConfig& m, OrderedJson& j) {
  const double scalar = 1 / (*m.softmax_scale * *m.softmax_scale), rounded = std::round(scalar);
  j["query_pre_attn_scalar"] = std::abs(scalar - rounded) < 1e-9 * scalar
                                   ? OrderedJson(static_cast<int64_t>(rounded))
                                   : OrderedJson(scalar);
  j["attn_logit_softcapping"] = or_null(m.attn_logit_softcapping);
  j["final_logit_softcapping"] = or_null(m.final_logit_softcapping);
  j["sliding_window"] = m.window_size.value_or(4096);
  write_layer_types(m, j);
}

static TensorNames gemma2_names() {
  TensorNames n = llama_names();
  n.post_attention_norm = "post_attention_layernorm";
  n.mlp_norm = "pre_feedforward_layernorm";
  n.post_mlp_norm = "post_feedforward_layernorm";
  return n;
}

extern const Family kGemma2;
const Family kGemma2 = {.model_type = "gemma2",
                        .architecture = "Gemma2ForCausalLM",
                        .like = LlamaLike{.tied = true,
                                          .attention_bias = true,
                                          .activation = "hidden_activation",
                                          .function = "gelu_pytorch_tanh",
                                          .groups = 4,
                                          .head = 256},
                        .read_rest = read_gemma2,
                        .write_rest = write_gemma2,
                        .names = gemma2_names()};

}  // namespace capstan::formats
