// Transfers between GPUs without the host, by the communicators of a CUDA backend (NCCL).
#pragma once

#include <memory>

#include "comm/channel.hpp"
#include "comm/watchdog/transfer_watch.hpp"
#include "tensor/cuda_device.hpp"

namespace capstan::comm {

struct NcclOptions {
  // This process in the world, for messages.
  int world_rank = 0;
  // How long the ranks may take to join the communicator.
  double timeout = 600;  // seconds
  // Detects errors and missing ranks. Null: the host notices them only when it waits, possibly forever.
  std::shared_ptr<TransferWatch> watch = nullptr;
};

// A channel on its own NCCL communicator, whose unique id is broadcast over `group`. A batch is one group
// call of NCCL on a high-priority stream of the channel. It begins after an event of the preceding queue, and
// an event marks its end. start() waits only for NCCL's calls to return; the first batch also connects the
// ranks, and waits until its peers start it.
//
// Collective over the group, whose ranks have different GPUs. `device` has a communicator and outlives the
// channel. Errors are ErrorCode::rank_failure: here, in start(), and from the watchdog, which aborts the
// communicators and makes the host's waits for the device throw.
std::unique_ptr<TensorChannel> make_nccl_channel(Communicator& group, cuda::CudaDevice& device,
                                                 const NcclOptions& options);

}  // namespace capstan::comm
