// The parts of a step that a recipe moves to host memory.
#pragma once

#include <string>

#include "config/sections/config.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

// Whether saved activations are moved to host memory (model.cpu_offloading). Where the device's memory is the
// host's, they stay where they are, so that the recipe of an accelerator gives the same numbers everywhere.
bool offloads_activations(const config::Config& config, const Device& device);

// The line of the log where the recipe asks for an offload that the device does not need; empty: none.
std::string offload_note(const config::Config& config, const Device& device);

}  // namespace capstan::train
