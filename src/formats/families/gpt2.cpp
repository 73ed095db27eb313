// GPT-2: learned positions, LayerNorm, biases everywhere; linear layers are stored [in, out].
#include "formats/family.hpp"

namespace capstan::formats {

static void read_gpt2(ConfigJson& c, config::ModelConfig& m) {
  m.num_layers = c.integer("n_layer", {}, kMaxLayers);
  m.hidden_size = c.integer("n_embd");
  m.num_attention_heads = c.integer("n_head", {}, kMaxHeads);
  if (m.hidden_size % m.num_attention_heads != 0) c.refuse("`n_embd` is not a multiple of `n_head`");
  m.num_query_groups = m.num_attention_heads;
  m.ffn_hidden_size = c.integer("n_inner", 4 * m.hidden_size);
  m.vocab_size = c.integer("vocab_size");
  m.max_position_embeddings = c.integer("n_positions", 1024);
  m.layernorm_epsilon = c.number("layer_norm_epsilon", 1e-5);
  m.position_embedding_type = config::PositionEmbedding::learned_absolute;
  read_activation(c, m, "activation_function", "gelu_new");
  m.share_embeddings_and_output_weights = c.boolean("tie_word_embeddings", true);
  const double hidden = c.number("resid_pdrop", 0.1), embedding = c.number("embd_pdrop", 0.1);
  if (hidden != embedding) c.refuse("`resid_pdrop` and `embd_pdrop` differ: both are model.hidden_dropout");
  m.hidden_dropout = hidden;
  m.attention_dropout = c.number("attn_pdrop", 0.1);
  m.init_method_std = c.number("initializer_range", 0.02);
  if (!c.boolean("scale_attn_weights", true)) m.softmax_scale = 1;
  c.only("scale_attn_by_inverse_layer_idx", false,
         "scores that shrink with the layer's number are not computed");
  c.only("add_cross_attention", false, "there is no second sequence to look at");
  // reorder_and_upcast_attn selects attention in fp32, as in Capstan. summary_* configure a classifier's
  // head. n_ctx repeats n_positions.
  c.changes_nothing({"reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                     "summary_proj_to_labels", "summary_first_dropout", "n_ctx"});
}

static void write_gpt2(const config::ModelConfig& m, OrderedJson& j) {
  j["n_layer"] = m.num_layers;
  j["n_embd"] = m.hidden_size;
  j["n_head"] = m.num_attention_heads;
  j["n_inner"] = *m.ffn_hidden_size;
  j["vocab_size"] = m.vocab_size;
  j["n_positions"] = *m.max_position_embeddings;
  j["layer_norm_epsilon"] = m.layernorm_epsilon;
  // The class has its own name for this activation.
  const bool of_gpt2 = m.activation_func == config::Activation::gelu_tanh;
  j["activation_function"] = of_gpt2 ? "gelu_new" : activation_name(m);
  j["tie_word_embeddings"] = m.share_embeddings_and_output_weights;
  j["resid_pdrop"] = m.hidden_dropout;
  j["embd_pdrop"] = m.hidden_dropout;
  j["attn_pdrop"] = m.attention_dropout;
  j["initializer_range"] = m.init_method_std;
  j["scale_attn_weights"] =
      !(m.softmax_scale && *m.softmax_scale == 1 && m.hidden_size != m.num_attention_heads);
}

static TensorNames gpt2_names() {
  TensorNames n;
  n.embedding = "transformer.wte";
  n.positions = "transformer.wpe";
  n.final_norm = "transformer.ln_f";
  n.head = "lm_head";
  n.layer = "transformer.h.{}.";
  n.input_norm = "ln_1";
  n.qkv = "attn.c_attn";
  n.output = "attn.c_proj";
  n.mlp_norm = "ln_2";
  n.fc1 = "mlp.c_fc";
  n.down = "mlp.c_proj";
  n.transposed = true;
  return n;
}

extern const Family kGpt2;
const Family kGpt2 = {.model_type = "gpt2",
                      .architecture = "GPT2LMHeadModel",
                      .read_rest = read_gpt2,
                      .write_rest = write_gpt2,
                      .names = gpt2_names(),
                      .prefix = "transformer."};

}  // namespace capstan::formats
