#include "train/setup/offload.hpp"

namespace capstan::train {

bool offloads_activations(const config::Config& config, const Device& device) {
  return config.model.cpu_offloading && !device.shares_host_memory();
}

std::string offload_note(const config::Config& config, const Device& device) {
  const bool activations = config.model.cpu_offloading, optimizer = config.optimizer.optimizer_cpu_offload;
  if (!(activations || optimizer) || !device.shares_host_memory()) return {};
  return std::string(activations ? "model.cpu_offloading" : "") + (activations && optimizer ? " and " : "") +
         (optimizer ? "optimizer.optimizer_cpu_offload" : "") +
         ": nothing is offloaded, because the memory of the device " + std::string(device.name()) +
         " is the host's";
}

}  // namespace capstan::train
