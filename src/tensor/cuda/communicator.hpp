// The communicators of the backend, on NCCL.
#pragma once

#include "tensor/cuda_backend.hpp"

namespace capstan::cuda {

const Communicator& nccl_communicator();

}  // namespace capstan::cuda
