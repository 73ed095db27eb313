// The device of a recipe.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/mesh.hpp"
#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

// ErrorCode::unsupported for a device whose backend this build lacks.
void check_device(config::DeviceKind kind);

// Whether the device's memory is the host's. That of `auto` is the CPU's in this version.
bool shares_host_memory(config::DeviceKind kind);

// The device `meta` that stands for the recipe's device: its kernels with their workspaces, the rounding and
// growth of its allocator, and memory of its own or the host's. For cuda, until its backend exists, the CPU's
// kernels stand for its own. threads 0, here and below: the cores of this host / local_ranks.
std::unique_ptr<Device> make_meta_device_for(config::DeviceKind kind, int64_t threads, int local_ranks);

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, int local_ranks);

// Makes the communicators of the mesh, with the channels that dist.distributed_backend chooses for the
// device, which outlives the mesh. Collective over the world. ErrorCode::unsupported for nccl_stand_in on
// several hosts.
void connect(comm::Mesh& mesh, const config::Config& config, comm::World& world, Device& device);

}  // namespace capstan::train
