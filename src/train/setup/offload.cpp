#include "train/setup/offload.hpp"

namespace capstan::train {

bool offloads_activations(const config::Config& config, const Device& device) {
  return config.model.cpu_offloading && !device.shares_host_memory();
}

std::string offload_note(const config::Config& config, const Device& device) {
  if (!config.model.cpu_offloading || !device.shares_host_memory()) return {};
  return "model.cpu_offloading: nothing is offloaded, because the memory of the device " +
         std::string(device.name()) + " is the host's";
}

}  // namespace capstan::train
