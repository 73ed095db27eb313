// Maps the parameters of a model, with Capstan's names and layout, to a file whose tensors have other names.
//
// Capstan's own names are Megatron's: linear_qkv holds for each key/value group its queries, then its key,
// then its value; linear_fc1 of a gated MLP holds the gate's rows, then the up projection's. The matrices of
// all experts of a layer are one tensor [experts, out, in].
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "config/sections/model.hpp"
#include "formats/rearranged.hpp"

namespace capstan::formats {

// Names in the file, without ".weight" and ".bias"; empty: the file has no such tensor. Names from input_norm
// on follow `layer`, whose `{}` is the layer index. post_* norms follow attention and the MLP, before the
// residual addition.
struct TensorNames {
  std::string embedding, positions, final_norm, head, layer;
  std::string input_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  // Separate q, k and v.
  std::string q, k, v;
  // Fused q, k and v: all rows of q, then of k, then of v.
  std::string qkv;
  // The rows of `qkv` are in Capstan's order instead: of each group its q, k and v (GPT-NeoX).
  bool qkv_by_group = false;
  std::string q_norm, k_norm, output;
  // The logits of attention sinks, a complete name.
  std::string sinks;
  // Latent attention: `q` or q_down, q_norm and q_up; kv_down, kv_norm and kv_up.
  std::string q_down, q_up, kv_down, kv_norm, kv_up;
  // Gate and up projection of a gated MLP, separate or fused.
  std::string gate, up, gate_up;
  // First linear layer of an MLP that is not gated.
  std::string fc1;
  std::string down;
  // MoE layers: the router, and the projections of one expert, whose index is in place of `{}`.
  std::string router, expert_gate, expert_up, expert_down;
  // All experts in one tensor [experts, in, out], and their biases [experts, out]: complete names. The
  // elements of gate and up alternate.
  std::string experts_gate_up, experts_gate_up_bias, experts_down, experts_down_bias;
  // All experts in one tensor [experts, out, in] for each projection, with biases [experts, out].
  std::string stacked_gate, stacked_up, stacked_down;
  // The bias with which the router chooses, a complete name.
  std::string expert_bias;
  // The shared expert and its gate.
  std::string shared_gate, shared_up, shared_down, shared_expert_gate;
  // Layers of multi-token prediction, which are numbered after the last layer: the norms of embedding and
  // hidden states, the projection of both, the final norm, and copies of embedding and head.
  std::string mtp_embedding_norm, mtp_hidden_norm, mtp_projection, mtp_final_norm, mtp_embedding, mtp_head;
  // Linear layers are stored [in, out].
  bool transposed = false;
  // Rows of q and k are ordered by adjacent pairs, not by halves (GGUF's llama).
  bool rope_in_pairs = false;
  // The file's gamma minus Capstan's.
  double norm_add = 0;
};

// Returns the table for a model, whose derived values must be set. Files contain no padding rows of the
// vocabulary.
ArrangementTable parameter_table(const config::ModelConfig& model, const TensorNames& names);

// The table for writing. With multi-token prediction, each of its layers gets copies of embedding and head.
ArrangementTable file_table(const config::ModelConfig& model, const TensorNames& names);

// What precedes the names of a layer's tensors in the file, such as "model.layers.61.".
std::string layer_prefix(const TensorNames& names, int64_t layer);
// The tensors that repeat the embedding and the head in a layer of multi-token prediction: name in the file,
// and name of the original.
std::vector<std::pair<std::string, std::string>> prediction_layer_copies(const config::ModelConfig& model,
                                                                         const TensorNames& names,
                                                                         int64_t depth);

// Whether a tensor, under Capstan's or a file's name, keeps its type where weights are converted: the bias of
// experts, which is fp32 beside weights in 16 bits.
bool keeps_type(std::string_view name);

}  // namespace capstan::formats
