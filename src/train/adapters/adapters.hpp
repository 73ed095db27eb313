// The base model of adapters: its origin, and the hash by which a run recognizes it.
#pragma once

#include <string>

#include "config/sections/config.hpp"
#include "ops/tape.hpp"
#include "parallel/flat_store.hpp"

namespace capstan::train {

class BaseModel;
struct StoredAdapters;

struct BaseWeights {
  // Path of the checkpoint or of the external model that was read.
  std::string path;
  // The value of BaseModel::hash().
  std::string hash;
  // The value of BaseModel::prediction_layers().
  int64_t prediction_layers = 0;
};

// Collective. Opens checkpoint.pretrained_checkpoint. `expected` is the hash that an earlier start recorded,
// or empty. Throws ErrorCode::failed if the hash differs.
BaseModel open_base(const config::Config& config, const std::string& expected, comm::Communicator& ranks);
// Collective. Reads all parameters except those of adapters from the base model.
BaseWeights load_base(const config::Config& config, parallel::FlatStore& store, const std::string& expected,
                      comm::Communicator& ranks);

// Opens the adapters of peft.adapter. They must be the ones that the recipe describes (ErrorCode::config) and
// must have been trained with `base` (ErrorCode::failed), whose hash may be empty.
StoredAdapters open_first_adapters(const config::Config& config, const BaseWeights& base);
// Collective. Reads the adapters. Without peft.adapter, they keep the values of initialize_parameters() and
// get their magnitudes. base: the result of load_base().
void begin_adapters(const config::Config& config, Device& device, parallel::FlatStore& store,
                    const BaseWeights& base);

}  // namespace capstan::train
