// The parts of a step that a recipe moves to host memory.
#pragma once

#include <optional>
#include <string>

#include "config/sections/config.hpp"
#include "optim/state_file.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

// Whether saved activations are moved to host memory (model.cpu_offloading). Where the device's memory is the
// host's, they stay where they are, so that the recipe of an accelerator gives the same numbers everywhere.
bool offloads_activations(const config::Config& config, const Device& device);

// optimizer.optimizer_offload_path where optimizer state is offloaded to files; else nullopt.
const std::optional<config::Path>& state_directory(const config::Config& config);

// The line of the log about the file of rank 0's optimizer state; empty: there is none.
std::string state_file_note(const optim::StateFile* file, int ranks);

// The line of the log where the recipe offloads a fraction of 0 of the optimizer state; empty: it does not.
std::string no_offload_note(const config::OptimizerConfig& config);

// The line of the log where the recipe asks for an offload that the device does not need; empty: none.
std::string offload_note(const config::Config& config, const Device& device);

}  // namespace capstan::train
