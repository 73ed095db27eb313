// How the parameters of a model, as Capstan names and lays them out, lie in a file whose tensors have other names.
//
// Capstan's own names are Megatron's: linear_qkv holds for each key/value group its queries, then its key, then its value;
// linear_fc1 of a gated network holds the gate's rows, then the others.
#pragma once

#include <string>

#include "config/sections/model.hpp"
#include "formats/rearranged.hpp"

namespace capstan::interchange {

// Names in the file, without ".weight" and ".bias"; an empty one: the file has no such tensor. Those from input_norm on stand
// behind `layer`, whose `{}` is the layer's number. post_* stand after attention and after the feed-forward network, before the
// residual addition.
struct TensorNames {
  std::string embedding, positions, final_norm, head, layer;
  std::string input_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  std::string q, k, v;  // or all rows of q, then of k, then of v in one
  std::string qkv;
  std::string q_norm, k_norm, output;
  std::string gate, up, gate_up;  // gated; or both in one
  std::string fc1;                // not gated
  std::string down;
  bool transposed = false;  // linear layers are stored [in, out]
  bool rope_in_pairs =
      false;  // rows of q and k are in the order of neighbouring pairs, not of two halves (GGUF's llama)
  double norm_add = 0;  // the file's gammas are this much larger
};

// model: with its derived values. Padding rows of the vocabulary are in no file.
ArrangementTable parameter_table(const config::ModelConfig& model, const TensorNames& names);

}  // namespace capstan::interchange
