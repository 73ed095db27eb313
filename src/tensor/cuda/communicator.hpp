// The communicators of the backend, on NCCL.
#pragma once

#include "tensor/cuda_backend.hpp"

namespace capstan::cuda {

// Weak: null in an object that was built without NCCL's header.
[[gnu::weak]] const Communicator& nccl_communicator();

}  // namespace capstan::cuda
