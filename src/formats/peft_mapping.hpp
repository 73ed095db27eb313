// Between PEFT's adapters and Capstan's. PEFT adapts the modules of the class of Transformers, Capstan the layers of its own
// model, where q, k and v are one layer and so are gate and up, unless `peft.scheme` is canonical:
//
//   modules apart in PEFT (Llama), each with an A of its own      canonical_lora, canonical_dora, one to one
//   the same, with the same A in all parts of a fused layer       lora, dora: what to_peft() makes of them
//   fused modules in PEFT (GPT-2, Phi-3)                          lora, dora, one to one
//
// An adapter of parts beside modules that are fused there has stacked A's, and B's that are zero outside of their part: the same
// update at a multiple of the rank. Only rows are permuted: no number changes, but where modules of a file differ in rank or scale
// (rank_pattern, alpha_pattern): then the smaller ranks are filled up with zeros, which stay zero in training, and B takes the
// ratio of the scales.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"
#include "config/sections/model.hpp"
#include "config/sections/peft.hpp"
#include "formats/parameter_table.hpp"
#include "formats/peft_adapter.hpp"

namespace capstan::interchange {

// Adapters of a model of ours: of one rank and scale, those of `peft`, and named by its layers' paths.
struct AdapterSet {
  config::PeftConfig
      peft;  // scheme, target_modules, dim, alpha, use_rslora, dropout; the rest at its defaults
  std::vector<AdapterModule> modules;
};

// model: the base's section with its derived values; names: of its class (class_names()). parts: prefer a canonical scheme, or a
// fused one; null: fused where no A is lost. place: for messages. ErrorCode::unsupported, ::format with every module that the
// model lacks or has in another shape.
AdapterSet to_capstan(const PeftAdapter& adapter, const config::ModelConfig& model, const TensorNames& names,
                      std::optional<bool> parts, const std::string& place);

// base: what base_model_name_or_path says. ErrorCode::unsupported for what PEFT cannot say (magnitudes of a part of a module).
PeftAdapter to_peft(const AdapterSet& adapters, const config::ModelConfig& model, const TensorNames& names,
                    const std::string& base);

// The tensors as a checkpoint names them, "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight" …; fp32.
std::unique_ptr<checkpoint::TensorSource> adapter_tensors(std::vector<AdapterModule> modules,
                                                          std::string place);
// And back: those of all layers that `peft` adapts. ErrorCode::format with all that are missing or of another shape.
AdapterSet read_adapters(checkpoint::TensorSource& tensors, const config::PeftConfig& peft,
                         const config::ModelConfig& model);

}  // namespace capstan::interchange
