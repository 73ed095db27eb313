// An architecture: how the layers of a decoder follow from the model section. Each is one file of this
// folder; registry.cpp lists them. `DecoderModel` holds what all decoders share.
#pragma once

#include <memory>

#include "config/sections/model.hpp"
#include "nn/decoder_layer.hpp"

namespace capstan::models {

struct Architecture {
  // Its value of model.architecture.
  config::Architecture name;
  // Refuses contradicting values of the fields that only this architecture reads; nullptr: there are none.
  void (*check)(const config::ModelConfig& config) = nullptr;
  // Declares the parameters of a layer of the kind that the model has at `index`, from 0.
  std::unique_ptr<nn::DecoderLayer> (*make_layer)(nn::ParamList& parameters, const nn::ModulePath& path,
                                                  const config::ModelConfig& config, int64_t index);
};

}  // namespace capstan::models
