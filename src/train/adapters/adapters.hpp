// The weights beside which adapters train: where they come from, and how a run knows them again.
#pragma once

#include <functional>
#include <string>

#include "config/core/config.hpp"
#include "ops/tape.hpp"
#include "parallel/flat_store.hpp"

namespace capstan::train {

struct BaseWeights {
  std::string path;  // the checkpoint, or other program's model, that was read
  std::string hash;  // BaseModel::hash()
};

// Collective. Reads the parameters that are no adapter's from checkpoint.pretrained_checkpoint. `expected`:
// the hash that an earlier start has noted, empty: none; ErrorCode::failed where it is another's.
BaseWeights load_base(const config::Config& config, parallel::FlatStore& store, const std::string& expected,
                      comm::Communicator& ranks);

// Collective. The adapters of peft.adapter, which must be those that the recipe describes
// (ErrorCode::config); without one those of initialize_parameters() stay, and get their magnitudes. base:
// what load_base() has read.
void begin_adapters(const config::Config& config, Device& device, parallel::FlatStore& store,
                    const BaseWeights& base);

// Collective. DoRA's magnitudes begin as the lengths of the rows of W + s B A. After load_base().
void initialize_magnitudes(const config::Config& config, Device& device, parallel::FlatStore& store);

// The weights that QLoRA keeps in 4 bits, by name: those of the layers' linear maps, whether they have an
// adapter or not. Null: none.
std::function<bool(const std::string& name)> quantized_weights(const config::PeftConfig& peft,
                                                               const config::ModelConfig& model);
parallel::Nf4Options nf4_options(const config::PeftConfig& peft);
// Has a store keep them so.
void quantize_base(const config::PeftConfig& peft, const config::ModelConfig& model,
                   parallel::FlatStore::Options& options);

}  // namespace capstan::train
