#include "train/setup/offload.hpp"

#include "base/text.hpp"

namespace capstan::train {

static bool offloads_optimizer(const config::OptimizerConfig& config) {
  return config.optimizer_cpu_offload && config.optimizer_offload_fraction > 0;
}

bool offloads_activations(const config::Config& config, const Device& device) {
  return config.model.cpu_offloading && !device.shares_host_memory();
}

const std::optional<config::Path>& state_directory(const config::Config& config) {
  static const std::optional<config::Path> none;
  return config.optimizer.optimizer_cpu_offload ? config.optimizer.optimizer_offload_path : none;
}

std::string state_file_note(const optim::StateFile* file, int ranks) {
  if (!file) return {};
  return "optimizer.optimizer_offload_path: " + human_bytes(static_cast<double>(file->bytes())) +
         " of optimizer state " + (ranks > 1 ? "of rank 0 " : "") + "in a file without a name in " +
         file->directory().string() +
         (file->is_direct() ? ", with direct I/O"
                            : ", with buffered I/O, because the file system has no direct I/O");
}

std::string no_offload_note(const config::OptimizerConfig& config) {
  if (!config.optimizer_cpu_offload || offloads_optimizer(config)) return {};
  return "optimizer.optimizer_offload_fraction is 0: no optimizer state is offloaded";
}

std::string offload_note(const config::Config& config, const Device& device) {
  const bool activations = config.model.cpu_offloading,
             optimizer = offloads_optimizer(config.optimizer) && !state_directory(config);
  if (!(activations || optimizer) || !device.shares_host_memory()) return {};
  return std::string(activations ? "model.cpu_offloading" : "") + (activations && optimizer ? " and " : "") +
         (optimizer ? "optimizer.optimizer_cpu_offload" : "") +
         ": nothing is offloaded, because the memory of the device " + std::string(device.name()) +
         " is the host's";
}

}  // namespace capstan::train
