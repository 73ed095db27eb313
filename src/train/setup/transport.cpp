#include "train/setup/transport.hpp"

#include <algorithm>
#include <memory>

#include "base/error.hpp"
#include "comm/blocking_channel.hpp"
#include "comm/channel.hpp"
#include "comm/collective_errors.hpp"
#include "comm/nccl_channel.hpp"
#include "comm/transfer_status.hpp"
#include "tensor/cuda_device.hpp"
#include "train/setup/cuda.hpp"
#include "train/setup/device.hpp"

namespace capstan::train {

namespace {

using config::DistributedBackend;

RankGpu rank_gpu(const comm::World& world, const cuda::DeviceFacts& facts, const cuda::Communicator* nccl) {
  RankGpu gpu{.address = world.host() + " " + facts.pci_address};
  int32_t version = 0;
  if (!nccl) {
    gpu.problem = "the CUDA backend was built without NCCL";
  } else if (const cuda::Status status = nccl->load(&version); !status.ok()) {
    gpu.problem = status.text ? status.text : "NCCL cannot be opened";
  } else {
    gpu.nccl_version = std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                       std::to_string(version % 100);
  }
  return gpu;
}

// Why the ranks cannot transfer by NCCL; empty: they can.
std::string nccl_problem(const std::vector<std::string>& problems,
                         const std::vector<std::string>& addresses) {
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty()) return problems[rank] + " (rank " + std::to_string(rank) + ")";
  if (const std::string shared = shared_gpu_count(addresses); !shared.empty())
    return shared + ", and NCCL needs one for each rank";
  return "";
}

}  // namespace

std::optional<RankGpu> gpu_of(const comm::World& world, const Device& device) {
  const auto* const gpu = dynamic_cast<const cuda::CudaDevice*>(&device);
  // The simulated device is none.
  if (!gpu || device.type() != DeviceType::cuda) return std::nullopt;
  return rank_gpu(world, gpu->facts(), gpu->communicator());
}

std::optional<RankGpu> gpu_of_rank(const comm::World& world, const config::Config& config) {
  const CudaStatus& status = cuda_status();
  if (device_kind(config.train.device) != config::DeviceKind::cuda || !status.usable) return std::nullopt;
  return rank_gpu(world, facts_of_rank(status, world.local_rank()), status.usable->communicator);
}

MemorySharers memory_sharers(comm::World& world, const std::optional<RankGpu>& gpu) {
  if (!gpu) return world.local_size();
  const auto addresses = comm::gather_texts(world.communicator(), gpu->address);
  const auto same = std::count(addresses.begin(), addresses.end(), gpu->address);
  return {world.local_size(), static_cast<int>(same)};
}

TransportChoice choose_transport(DistributedBackend backend, const std::vector<std::string>& problems,
                                 const std::vector<std::string>& addresses, const std::string& nccl_version) {
  const bool automatic = backend == DistributedBackend::automatic;
  if (backend == DistributedBackend::nccl_stand_in) return {Transport::nccl_stand_in, ""};
  if (!automatic && backend != DistributedBackend::nccl) return {};
  if (addresses.empty()) {
    if (automatic) return {};
    fail(ErrorCode::unsupported,
         "dist.distributed_backend: nccl: the ranks do not train on GPUs, whose memory NCCL transfers",
         "dist.distributed_backend=auto");
  }
  const std::string problem = nccl_problem(problems, addresses);
  if (problem.empty())
    return {Transport::nccl,
            "transfers between GPUs by NCCL" + (nccl_version.empty() ? "" : " " + nccl_version)};
  if (!automatic)
    fail(ErrorCode::unsupported, "dist.distributed_backend: nccl: " + problem,
         "dist.distributed_backend=auto transfers through host memory then (docs/gpu.md)");
  return {Transport::host,
          "dist.distributed_backend=auto: transfers go through host memory, because " + problem};
}

TransportChoice choose_transport(const config::Config& config, comm::World& world,
                                 const std::optional<RankGpu>& gpu) {
  const DistributedBackend backend = config.dist.distributed_backend;
  if (world.size() == 1) {
    // There is nothing to transfer, and nothing to say about it.
    if (backend == DistributedBackend::nccl && !gpu) (void)choose_transport(backend, {}, {});
    return {};
  }
  if (backend == DistributedBackend::nccl_stand_in && world.local_size() != world.size())
    fail(ErrorCode::unsupported, "dist.distributed_backend: nccl_stand_in: the ranks are on several hosts",
         "dist.distributed_backend=auto");
  if (!gpu) return choose_transport(backend, {}, {});
  return choose_transport(backend, comm::gather_texts(world.communicator(), gpu->problem),
                          comm::gather_texts(world.communicator(), gpu->address), gpu->nccl_version);
}

std::string tensor_overlap_note(const config::Config& config, Transport transport) {
  const bool overlaps = config.comm_overlap.tp_comm_overlap && config.dist.tensor_model_parallel_size > 1;
  if (!overlaps || runs_without_host(transport)) return "";
  return "comm_overlap.tp_comm_overlap: transfers go through host memory, and the host waits for each part "
         "before it sends it: few of them overlap with GEMMs";
}

Transport planned_transport(const config::Config& config) {
  const DistributedBackend backend = config.dist.distributed_backend;
  if (config.dist.world_size == 1) return Transport::host;
  if (backend == DistributedBackend::nccl) return Transport::nccl;
  if (backend == DistributedBackend::nccl_stand_in) return Transport::nccl_stand_in;
  const bool plans_gpus = backend == DistributedBackend::automatic &&
                          device_kind(config.train.device) == config::DeviceKind::cuda;
  const CudaStatus& here = cuda_status();
  return plans_gpus && (!here.built || here.has_nccl) ? Transport::nccl : Transport::host;
}

// ---- channels

namespace {

// Channel of a group over which the ranks exchange no tensors, so that it needs no communicator.
class NoTensors final : public comm::TensorChannel {
 public:
  explicit NoTensors(comm::Communicator& group) : TensorChannel(group) {}

 protected:
  std::unique_ptr<comm::Completion> begin(const comm::TransferBatch& batch, Queue) override {
    fail(ErrorCode::internal,
         "internal error: the group `" + group_.name() +
             "` has no communicator for tensors (Mesh::carries_tensors): " + text_of(batch));
  }
};

comm::Mesh::ChannelFactory for_groups_with_tensors(comm::Mesh::ChannelFactory make_channel) {
  return [make_channel](comm::Communicator& group) -> std::unique_ptr<comm::TensorChannel> {
    if (comm::Mesh::carries_tensors(group.name())) return make_channel(group);
    return std::make_unique<NoTensors>(group);
  };
}

// The first transfer over a link connects its ranks, and their hosts wait for it. It is made here, where all
// ranks reach it, because in a schedule a stage posts receives early.
void connect_link(comm::Communicator& group, Device& device) {
  CategoryScope scope(MemoryCategory::workspace);
  const Tensor number = Tensor::zeros(device, {1});
  comm::TransferBatch batch("connection");
  if (group.rank() == comm::StageLink::kSender)
    batch.send(number, comm::StageLink::kReceiver);
  else
    batch.receive(number, comm::StageLink::kSender);
  group.channel().start(std::move(batch)).wait();
}

void connect_by_nccl(comm::Mesh& mesh, const config::Config& config, comm::World& world,
                     cuda::CudaDevice& device) {
  const comm::NcclOptions options{.world_rank = world.rank(),
                                  .timeout = config.resilience.timeout.seconds,
                                  .watch = world.transfer_watch()};
  mesh.connect(world.communicator(), for_groups_with_tensors([&](comm::Communicator& group) {
                 return comm::make_nccl_channel(group, device, options);
               }));
  for (const std::string& name : mesh.group_names())
    if (comm::Mesh::is_link(name) && !mesh.group(name).is_single()) connect_link(mesh.group(name), device);
}

}  // namespace

void connect(comm::Mesh& mesh, Transport transport, const config::Config& config, comm::World& world,
             Device& device) {
  if (transport == Transport::host || world.size() == 1) return mesh.connect(world.communicator());
  if (transport == Transport::nccl) {
    auto* const gpu = dynamic_cast<cuda::CudaDevice*>(&device);
    CAPSTAN_ASSERT(gpu, "NCCL on a device that is no GPU");
    return connect_by_nccl(mesh, config, world, *gpu);
  }
  const auto status = std::make_shared<comm::TransferStatus>(world.communicator());
  mesh.connect(world.communicator(), for_groups_with_tensors([&](comm::Communicator& group) {
                 return comm::make_blocking_channel(group, device, status);
               }));
}

void connect_meta(comm::Mesh& mesh, Transport transport) {
  mesh.connect_meta(runs_without_host(transport) ? comm::make_direct_meta_channel
                                                 : comm::make_staging_channel);
}

}  // namespace capstan::train
