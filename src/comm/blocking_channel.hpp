// A substitute for NCCL on the checked and simulated devices, to test that transfers are ordered as NCCL
// requires. A batch blocks its queue until all peers have reached their batch, and a send until the receiver
// takes the data. Nothing is buffered, and only the order matches a send with its receive.
#pragma once

#include <memory>

#include "comm/channel.hpp"
#include "comm/transfer_status.hpp"

namespace capstan::comm {

// Each channel has queues of `device`, which outlives it. Collective over the group, whose ranks are on one
// host.
//
// Errors appear where the host next waits for the device, as ErrorCode::rank_failure on all ranks concerned:
// peers whose transfers do not match (both are named), ranks that wait for each other (all are named with
// their transfers), and ranks that start the batches of two groups which they share in different orders (both
// batches are named; links between pipeline stages have no order). The batches that the queues work on
// are published for the watchdog (DeviceBatches), which names a rank that does not come to a batch.
std::unique_ptr<TensorChannel> make_blocking_channel(Communicator& group, Device& device,
                                                     std::shared_ptr<TransferStatus> status);

}  // namespace capstan::comm
