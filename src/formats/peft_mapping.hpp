// Maps adapters between PEFT and Capstan. PEFT adapts the modules of a Transformers class, Capstan the layers
// of its own model, where q, k and v are one layer and so are gate and up, unless `peft.scheme` is canonical:
//
//   separate modules in PEFT (Llama), each with its own A        canonical_lora, canonical_dora, one to one
//   separate modules with the same A for a fused layer            lora, dora: as to_peft() writes them
//   fused modules in PEFT (GPT-2, Phi-3)                          lora, dora, one to one
// A canonical adapter of a module that is fused in PEFT has stacked A's, and B's that are zero outside of
// their slice: the same update at a multiple of the rank. The mapping only permutes rows and changes no
// value, except where modules of a file differ in rank or scale (rank_pattern, alpha_pattern): it pads
// smaller ranks with zeros, which stay zero in training, and multiplies B by the ratio of the scales.
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

namespace capstan::formats {

// Adapters of a Capstan model, with the rank and scale of `peft`, named by the layers' paths.
struct AdapterSet {
  // scheme, target_modules, dim, alpha, use_rslora, dropout; other fields have their defaults.
  config::PeftConfig peft;
  std::vector<AdapterModule> modules;
};

// Converts an adapter from PEFT. model: the base model's section, including derived values. names: the names
// of its class (class_names()). parts: prefer a canonical (true) or fused scheme; nullopt: fused if the A's
// agree. location: names the adapter in messages. Throws ErrorCode::unsupported, or ::format with every
// module that the model lacks or has in another shape.
AdapterSet to_capstan(const PeftAdapter& adapter, const config::ModelConfig& model, const TensorNames& names,
                      std::optional<bool> parts, const std::string& location);

// Converts adapters to PEFT. base: the base_model_name_or_path to write. Throws ErrorCode::unsupported for
// adapters that PEFT cannot express (magnitudes of a slice of a module).
PeftAdapter to_peft(const AdapterSet& adapters, const config::ModelConfig& model, const TensorNames& names,
                    const std::string& base);

// The tensors under a checkpoint's names, "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight" …; fp32.
std::unique_ptr<checkpoint::TensorSource> adapter_tensors(std::vector<AdapterModule> modules,
                                                          std::string location);
// Reads the adapters of all layers that `peft` adapts from a checkpoint. Throws ErrorCode::format with all
// tensors that are missing or have another shape.
AdapterSet read_adapters(checkpoint::TensorSource& tensors, const config::PeftConfig& peft,
                         const config::ModelConfig& model);

}  // namespace capstan::formats
