// A checkpoint made ready for evaluation and generation: its recipe's model, its tokenizer, its weights. No optimizer, no
// gradients.
#pragma once

#include <memory>

#include "comm/communicator.hpp"
#include "config/config.hpp"
#include "data/tokenizer/tokenizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/setup.hpp"

namespace capstan::train {

class LoadedModel {
 public:
  config::Config config;
  std::unique_ptr<Device> device;
  std::unique_ptr<comm::Communicator> self;
  std::unique_ptr<models::Model> model;
  std::unique_ptr<parallel::FlatStore> store;
  std::shared_ptr<const data::Tokenizer> tokenizer;
};

// config: the recipe that the checkpoint carries (recipe.yaml), with the user's overrides. The tokenizer is the checkpoint's
// own copy where there is one. Verifies every file that it reads.
std::shared_ptr<LoadedModel> load_model(const std::filesystem::path& checkpoint,
                                        const config::Config& config);

}  // namespace capstan::train
