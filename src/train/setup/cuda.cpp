#include "train/setup/cuda.hpp"

#include <algorithm>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "comm/collective_errors.hpp"
#include "kernels/each_family.hpp"
#include "tensor/cuda_device.hpp"

namespace capstan::train {

std::string missing_kernels(const kernels::Table& table) {
  std::vector<std::string> missing;
  kernels::for_each_family([&](const char* name, auto family) {
    if (!(table.*family)) missing.emplace_back(name);
  });
  return missing.empty() ? "" : "the kernels " + join(missing, ", ");
}

CudaStatus cuda_status(const cuda::Library& library) {
  CudaStatus status{.built = library.found, .reason = library.reason, .help = library.help};
  if (!library.backend) return status;
  const cuda::Backend& backend = *library.backend;
  const std::string missing = backend.table ? missing_kernels(*backend.table) : "kernels";
  if (missing.empty()) status.table = backend.table;
  status.has_nccl = backend.communicator != nullptr;

  int32_t devices = 0;
  if (const cuda::Status counted = backend.runtime->count_devices(&devices); !counted.ok()) {
    status.reason = counted.text ? counted.text : "the CUDA backend finds no device";
    status.help = "`nvidia-smi` shows the driver and its GPUs; CUDA_VISIBLE_DEVICES hides GPUs";
  } else if (!missing.empty()) {
    status.reason = backend.table ? "the CUDA backend lacks " + missing : "the CUDA backend has no kernels";
    status.help = "this version does not train on GPUs yet (docs/gpu.md)";
  } else {
    status.usable = &backend;
    status.devices = devices;
  }
  return status;
}

const CudaStatus& cuda_status() {
  static const CudaStatus status = cuda_status(cuda::library());
  return status;
}

std::unique_ptr<Device> make_cuda_device(const CudaStatus& status, int local_rank, int threads) {
  CAPSTAN_ASSERT(status.usable, "a device of a backend that cannot be used");
  return cuda::make_cuda_device(*status.usable, *status.table, local_rank % status.devices, threads);
}

std::string shared_gpu_count(const std::vector<std::string>& gpus) {
  const auto ranks = std::count_if(gpus.begin(), gpus.end(), [](const auto& gpu) { return !gpu.empty(); });
  std::set<std::string> distinct(gpus.begin(), gpus.end());
  distinct.erase("");
  if (static_cast<size_t>(ranks) == distinct.size()) return "";
  return counted(ranks, "rank") + " share " + counted(static_cast<int64_t>(distinct.size()), "GPU");
}

std::string shared_gpus(const std::vector<std::string>& gpus) {
  const std::string shared = shared_gpu_count(gpus);
  if (shared.empty()) return "";
  return shared + ": their kernels run in turn, and the memory of a GPU is that of all its ranks";
}

std::string shared_gpus(comm::World& world, const Device& device) {
  const auto* const gpu = dynamic_cast<const cuda::CudaDevice*>(&device);
  if (!gpu) return "";
  return shared_gpus(
      comm::gather_texts(world.communicator(), world.host() + " " + std::string(gpu->facts().pci_address)));
}

}  // namespace capstan::train
