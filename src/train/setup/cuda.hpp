// Whether this program can train on GPUs here, and on which of them a rank trains.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.hpp"
#include "kernels/table.hpp"
#include "tensor/cuda_library.hpp"
#include "tensor/device.hpp"
#include "train/setup/device.hpp"

namespace capstan::train {

struct CudaStatus {
  // Null unless a device can be used: the backend is there, and sees devices on which its kernels run.
  const cuda::Backend* usable = nullptr;
  // The backend's object is there.
  bool built = false;
  // The backend was built with NCCL.
  bool has_nccl = false;
  // The backend's kernels, also where there is no device; null: there is no backend.
  const kernels::Table* table = nullptr;
  // Devices that this process sees.
  int devices = 0;
  // Why no device can be used, and what to do about it.
  std::string reason, help;
};
CudaStatus cuda_status(const cuda::Library& library);
// The status of cuda::library(), found by the first call.
const CudaStatus& cuda_status();

// The least compute capability on which the kernels run, 80 for 8.0: they multiply by instructions of sm_80.
inline constexpr int kLeastCapability = 80;
// "8.0".
std::string capability_text(int capability);

// The GPU that a local rank takes. status: of a backend that can be used.
cuda::DeviceFacts facts_of_rank(const CudaStatus& status, int local_rank);

// Bytes of a GPU for each of the ranks that share it; nothing for a backend that cannot be used.
std::optional<int64_t> gpu_memory_of_rank(const CudaStatus& status, MemorySharers sharers);
// Of these bytes, what CUDA's context, the code of kernels and NCCL take at least: assumed, not measured. The
// files of clusters leave 3 GiB, so that a plan does not promise too much.
inline constexpr int64_t kCudaMemory = int64_t{1} << 30;

// Makes the device of a rank. Ranks of a host that see the same devices take them in turn.
std::unique_ptr<Device> make_cuda_device(const CudaStatus& status, int local_rank, int threads);

// Name of the GPU that the device is, as its driver says it; empty: it is none.
std::string gpu_name(const Device& device);

// A sentence where several ranks share a GPU, else empty. Collective; every rank has a device of the same
// kind.
std::string shared_gpus(comm::World& world, const Device& device);
// The same for the names of the ranks' GPUs; empty ones are no GPUs.
std::string shared_gpus(const std::vector<std::string>& gpus);
// "4 ranks share 2 GPUs", or empty.
std::string shared_gpu_count(const std::vector<std::string>& gpus);

}  // namespace capstan::train
