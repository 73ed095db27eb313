#include "train/setup/device.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "comm/blocking_channel.hpp"
#include "comm/transfer_status.hpp"
#include "kernels/table.hpp"

namespace capstan::train {

void check_device(config::DeviceKind kind) {
  if (kind == config::DeviceKind::cuda)
    fail(ErrorCode::unsupported, "train.device: cuda: this build has no CUDA backend",
         "train.device=cpu trains here; recipes for GPUs can be checked and shown without one");
  if (kind == config::DeviceKind::meta)
    fail(ErrorCode::unsupported,
         "train.device: meta: the meta device holds shapes and no values, and cannot train",
         "train.device=cpu");
}

static int threads_per_rank(int64_t threads, int local_ranks) {
  return threads > 0 ? static_cast<int>(threads) : std::max(1, available_cores() / local_ranks);
}

bool shares_host_memory(config::DeviceKind kind) {
  return kind != config::DeviceKind::cuda && kind != config::DeviceKind::checked;
}

std::unique_ptr<Device> make_meta_device_for(config::DeviceKind kind, int64_t threads, int local_ranks) {
  return make_meta_device(kernels::cpu_table(), threads_per_rank(threads, local_ranks), AllocatorRules{},
                          shares_host_memory(kind));
}

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, int local_ranks) {
  check_device(kind);
  const int count = threads_per_rank(threads, local_ranks);
  if (kind == config::DeviceKind::checked) return make_checked_device(kernels::cpu_table(), count);
  return make_cpu_device(kernels::cpu_table(), count);
}

void connect(comm::Mesh& mesh, const config::Config& config, comm::World& world, Device& device) {
  if (config.dist.distributed_backend != config::DistributedBackend::nccl_stand_in || world.size() == 1)
    return mesh.connect(world.communicator());
  if (world.local_size() != world.size())
    fail(ErrorCode::unsupported, "dist.distributed_backend: nccl_stand_in: the ranks are on several hosts",
         "dist.distributed_backend=auto");
  const auto status = std::make_shared<comm::TransferStatus>(world.communicator());
  mesh.connect(world.communicator(),
               [&](comm::Communicator& group) { return comm::make_blocking_channel(group, device, status); });
}

}  // namespace capstan::train
