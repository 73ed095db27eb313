// Measures this machine as a cluster of `capstan plan`.
#pragma once

#include <string>

#include "comm/world.hpp"
#include "config/sections/config.hpp"

namespace capstan::cli {

// The text of a cluster file, with the origin of each figure beside it. GEMMs and attention are measured in
// the compute type of the recipe, on its device; collectives over the ranks of the world, which share the
// cores of their host as in a run. seconds: for each kernel. Collective; ErrorCode::unsupported for a device
// whose memory is not known.
std::string measured_cluster(const config::Config& config, comm::World& world, double seconds);

}  // namespace capstan::cli
