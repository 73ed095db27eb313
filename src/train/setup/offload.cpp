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

// Follows the line about a file whose chunks in memory, with the gradients of two, are as large as the file:
// a chunk size with which they are a tenth of it. Empty: they are smaller, or the state is small.
static std::string smaller_chunks(const optim::StateFile& file) {
  constexpr int64_t kBytesOfAdam = 12, kLeast = 4096;
  const int64_t elements = file.bytes() / kBytesOfAdam / 32 / 64 * 64;
  if (file.memory_bytes() / 4 * 5 < file.bytes() || elements < kLeast) return {};
  return "; no memory is saved, because its chunks in memory are as large: set "
         "optimizer.optimizer_offload_chunk_size=" +
         std::to_string(elements);
}

std::string state_file_note(const optim::StateFile* file, int ranks) {
  if (!file) return {};
  return "optimizer.optimizer_offload_path: " + human_bytes(static_cast<double>(file->bytes())) +
         " of optimizer state " + (ranks > 1 ? "of rank 0 " : "") + "in a file without a name in " +
         file->directory().string() +
         (file->is_direct() ? ", with direct I/O"
                            : ", with buffered I/O, because the file system has no direct I/O") +
         smaller_chunks(*file);
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
