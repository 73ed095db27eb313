// The device of a recipe.
#pragma once

#include <cstdint>
#include <memory>

#include "config/core/config.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

// ErrorCode::unsupported for a device whose backend this build lacks.
void check_device(config::DeviceKind kind);

// threads 0: cores of this host / ranks of this host.
int threads_per_rank(int64_t threads, int local_ranks);

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, int local_ranks);

}  // namespace capstan::train
