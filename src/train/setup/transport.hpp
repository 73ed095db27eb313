// Chooses how the ranks of a recipe transfer tensors, from dist.distributed_backend and the capabilities of
// their devices.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/mesh.hpp"
#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "tensor/device.hpp"
#include "train/setup/device.hpp"

namespace capstan::train {

enum class Transport : uint8_t {
  // Through host memory and MPI.
  host,
  // Between GPUs, without the host.
  nccl,
  // The stand-in for NCCL on the checked and simulated devices.
  nccl_stand_in,
};
// True if transfers run without the host.
inline bool runs_without_host(Transport transport) {
  return transport != Transport::host;
}

// The GPU of a rank.
struct RankGpu {
  // Host and PCI address: the same for ranks that share it.
  std::string address;
  // Why its backend cannot transfer by NCCL; empty: it can.
  std::string problem;
  // Version of NCCL, for example "2.28.9"; empty if `problem` is set.
  std::string nccl_version;
};
// The GPU of a device; nullopt: the device is no GPU.
std::optional<RankGpu> gpu_of(const comm::World& world, const Device& device);
// The GPU of a rank whose device has not been created yet.
std::optional<RankGpu> gpu_of_rank(const comm::World& world, const config::Config& config);
// The ranks with which this one shares memory. gpu: its GPU; nothing: no rank has one. Collective.
MemorySharers memory_sharers(comm::World& world, const std::optional<RankGpu>& gpu);

struct TransportChoice {
  Transport transport = Transport::host;
  // A line for the log about transfers between GPUs; empty: there are none.
  std::string note;
};
// ErrorCode::unsupported where the recipe asks for a transport that the ranks cannot use: `nccl` without
// GPUs, with a GPU that ranks share, or without its library; `nccl_stand_in` on several hosts. gpu: this
// rank's, nullopt on all ranks or on none. Collective over the world.
TransportChoice choose_transport(const config::Config& config, comm::World& world,
                                 const std::optional<RankGpu>& gpu);
// Chooses from RankGpu::problem and RankGpu::address of all ranks. Empty lists: there are no GPUs.
TransportChoice choose_transport(config::DistributedBackend backend, const std::vector<std::string>& problems,
                                 const std::vector<std::string>& addresses,
                                 const std::string& nccl_version = "");
// A line for the log where the transport hides few of the transfers that comm_overlap.tp_comm_overlap runs
// beside GEMMs; empty: there is nothing to say.
std::string tensor_overlap_note(const config::Config& config, Transport transport);
// The transport for estimates: assumes that each rank has its own GPU, and NCCL unless the CUDA backend of
// this machine was built without it.
Transport planned_transport(const config::Config& config);

// Makes the communicators of the mesh, with channels on the device, which outlives the mesh. Collective over
// the world.
void connect(comm::Mesh& mesh, Transport transport, const config::Config& config, comm::World& world,
             Device& device);
// The same channels on the meta device, for estimates.
void connect_meta(comm::Mesh& mesh, Transport transport);

}  // namespace capstan::train
