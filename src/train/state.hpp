// What a checkpoint holds of a run, and how it gets there and back: main parameters, optimizer state and a few counters.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "comm/world.hpp"
#include "data/tokenizer/tokenizer.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"

namespace capstan::train {

struct TrainState {
  int64_t step = 0;              // finished steps
  int64_t consumed_samples = 0;  // position in the data
  int64_t consumed_tokens = 0;
  int64_t schedule_samples = 0;  // position in the schedules: samples of successful updates
};

struct SavePlan {
  std::filesystem::path root;  // directory of the checkpoints
  std::string run_id, recipe, recipe_hash, version, layout, parent;
  checkpoint::Retention retention;
  bool optimizer = true;
  const data::Tokenizer* tokenizer = nullptr;  // copied beside the weights
};

// Collective. Every tensor is written by one rank of the world. Throws on every rank when it failed on any; what was there
// before is then unchanged. Returns the checkpoint's directory.
std::filesystem::path save_state(comm::World& world, const SavePlan& plan, const TrainState& state,
                                 const parallel::FlatStore& store, const optim::Optimizer& optimizer);

// Reads parameters, and with `optimizer` its state and the counters. Shapes are checked first: all differences at once.
TrainState load_state(checkpoint::Reader& reader, parallel::FlatStore& store, optim::Optimizer* optimizer);

// Parameters alone, into whatever type the store computes with.
void load_parameters(checkpoint::Reader& reader, parallel::FlatStore& store);

// The newest checkpoint under `root` that verifies, the same on all ranks; rank 0 looks. `refused` (rank 0) says why newer
// ones do not count.
std::optional<checkpoint::Checkpoint> find_checkpoint(comm::World& world, const std::filesystem::path& root,
                                                      std::vector<std::string>& refused);

}  // namespace capstan::train
