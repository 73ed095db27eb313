// GPT-NeoX and Pythia: LayerNorm, biases, RoPE on a part of each head; attention and MLP side by side, or
// without `use_parallel_residual` one after the other.
#include "formats/family.hpp"

namespace capstan::formats {

using config::Architecture;
using config::ModelConfig;

namespace {

constexpr RopeKeys kRope = {
    .base = "rotary_emb_base", .fraction = "rotary_pct", .class_fraction = 0.25, .partial = true};

void read_gpt_neox(ConfigJson& c, ModelConfig& m) {
  m.num_layers = c.integer("num_hidden_layers", {}, kMaxLayers);
  m.hidden_size = c.integer("hidden_size");
  m.num_attention_heads = c.integer("num_attention_heads", {}, kMaxHeads);
  if (m.hidden_size % m.num_attention_heads != 0)
    c.refuse("`hidden_size` is not a multiple of `num_attention_heads`");
  m.num_query_groups = m.num_attention_heads;
  m.kv_channels = m.hidden_size / m.num_attention_heads;
  m.ffn_hidden_size = c.integer("intermediate_size");
  m.vocab_size = c.integer("vocab_size");
  m.max_position_embeddings = c.integer("max_position_embeddings");
  m.architecture = c.boolean("use_parallel_residual", true) ? Architecture::gpt_neox : Architecture::gpt;
  m.layernorm_epsilon = c.number("layer_norm_eps", 1e-5);
  read_activation(c, m, "hidden_act", "gelu");
  m.add_bias_linear = c.boolean("attention_bias", true);
  m.add_mlp_bias = true;
  m.share_embeddings_and_output_weights = c.boolean("tie_word_embeddings", false);
  m.hidden_dropout = c.number("hidden_dropout", 0);
  m.attention_dropout = c.number("attention_dropout", 0);
  m.init_method_std = c.number("initializer_range", 0.02);
  read_rope(c, m, kRope);
  // The dropout of a classifier's head; the class of the language model is a decoder with any value.
  c.changes_nothing({"classifier_dropout", "is_decoder"});
}

void write_gpt_neox(const ModelConfig& m, OrderedJson& j) {
  j["num_hidden_layers"] = m.num_layers;
  j["hidden_size"] = m.hidden_size;
  j["num_attention_heads"] = m.num_attention_heads;
  j["intermediate_size"] = *m.ffn_hidden_size;
  j["vocab_size"] = m.vocab_size;
  j["max_position_embeddings"] = *m.max_position_embeddings;
  j["use_parallel_residual"] = m.architecture == Architecture::gpt_neox;
  j["layer_norm_eps"] = m.layernorm_epsilon;
  j["hidden_act"] = activation_name(m);
  j["attention_bias"] = *m.add_attention_output_bias;
  j["tie_word_embeddings"] = m.share_embeddings_and_output_weights;
  j["hidden_dropout"] = m.hidden_dropout;
  j["attention_dropout"] = m.attention_dropout;
  j["initializer_range"] = m.init_method_std;
  write_rope(m, j, kRope);
}

TensorNames gpt_neox_names() {
  TensorNames n;
  n.embedding = "gpt_neox.embed_in";
  n.final_norm = "gpt_neox.final_layer_norm";
  n.head = "embed_out";
  n.layer = "gpt_neox.layers.{}.";
  n.input_norm = "input_layernorm";
  n.qkv = "attention.query_key_value";
  n.qkv_by_group = true;
  n.output = "attention.dense";
  n.mlp_norm = "post_attention_layernorm";
  n.fc1 = "mlp.dense_h_to_4h";
  n.down = "mlp.dense_4h_to_h";
  return n;
}

}  // namespace

extern const Family kGptNeox;
const Family kGptNeox = {.model_type = "gpt_neox",
                         .architecture = "GPTNeoXForCausalLM",
                         .read_rest = read_gpt_neox,
                         .write_rest = write_gpt_neox,
                         .names = gpt_neox_names(),
                         .prefix = "gpt_neox."};

}  // namespace capstan::formats
