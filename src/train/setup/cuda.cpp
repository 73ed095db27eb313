#include "train/setup/cuda.hpp"

#include <algorithm>
#include <set>
#include <vector>

#include "base/division.hpp"
#include "base/error.hpp"
#include "base/wording.hpp"
#include "comm/collective_errors.hpp"
#include "tensor/cuda_device.hpp"

namespace capstan::train {

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

static cuda::DeviceFacts facts_of(const cuda::Backend& backend, int device) {
  cuda::DeviceFacts facts;
  const cuda::Status described = backend.runtime->describe_device(device, &facts);
  if (!described.ok())
    fail(ErrorCode::failed, std::string("cannot read the properties of the device: ") +
                                (described.text ? described.text : "the CUDA backend gives no reason"));
  return facts;
}

// Why the kernels do not run on one of the devices; empty: they run on all of them.
static std::string old_device(const cuda::Backend& backend, int devices) {
  for (int device = 0; device < devices; ++device) {
    const cuda::DeviceFacts facts = facts_of(backend, device);
    if (const int capability = 10 * facts.major + facts.minor; capability < kLeastCapability)
      return "GPU " + std::to_string(device) + " (" + facts.name + ") has compute capability " +
             capability_text(capability) + ", and the kernels need " + capability_text(kLeastCapability) +
             " or newer";
  }
  return "";
}

CudaStatus cuda_status(const cuda::Library& library) {
  CudaStatus status{.built = library.found, .reason = library.reason, .help = library.help};
  if (!library.backend) return status;
  const cuda::Backend& backend = *library.backend;
  status.table = backend.table;
  status.has_nccl = backend.communicator != nullptr;

  int32_t devices = 0;
  if (const cuda::Status counted = backend.runtime->count_devices(&devices); !counted.ok()) {
    status.reason = counted.text ? counted.text : "the CUDA backend finds no device";
    status.help = "`nvidia-smi` shows the driver and its GPUs; CUDA_VISIBLE_DEVICES hides GPUs";
  } else if (status.reason = old_device(backend, devices); !status.reason.empty()) {
    status.help = "CUDA_VISIBLE_DEVICES hides GPUs that are not to be used";
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

cuda::DeviceFacts facts_of_rank(const CudaStatus& status, int local_rank) {
  CAPSTAN_ASSERT(status.usable, "a device of a backend that cannot be used");
  return facts_of(*status.usable, local_rank % status.devices);
}

std::string gpu_name(const Device& device) {
  const auto* const gpu = dynamic_cast<const cuda::CudaDevice*>(&device);
  // The simulated device is none.
  return gpu && device.type() == DeviceType::cuda ? gpu->facts().name : std::string();
}

std::optional<int64_t> gpu_memory_of_rank(const CudaStatus& status, MemorySharers sharers) {
  if (!status.usable) return std::nullopt;
  const int ranks = sharers.gpu > 0 ? sharers.gpu : ceil_div(std::max(1, sharers.host), status.devices);
  return facts_of_rank(status, 0).memory / ranks;
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
