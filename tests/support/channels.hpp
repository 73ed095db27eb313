// The channels over which tests transfer tensors.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>

#include "comm/blocking_channel.hpp"
#include "comm/nccl_channel.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/worlds.hpp"

namespace capstan::test {

// The table in which the blocking channels of this program's world meet.
inline const std::shared_ptr<comm::TransferStatus>& transfer_status() {
  static const auto status = std::make_shared<comm::TransferStatus>(world().communicator());
  return status;
}

// The error of a rank that the host finds when it waits for the device; empty: none.
inline std::string device_error(Device& device) {
  const std::string error = error_of([&] { device.synchronize(); });
  CHECK((error.empty() || error.starts_with(name_of(ErrorCode::rank_failure))));
  return error;
}

// Whether blocking channels transfer the memory of this device: threads of the host read and write it, which
// a GPU's is not.
inline bool has_blocking_channels(const Device& device) {
  return !device.shares_host_memory() && device.type() != DeviceType::cuda;
}

// Gives the group a blocking channel while it lives, where it has several ranks. Collective over the group.
class WithBlockingChannel {
 public:
  WithBlockingChannel(comm::Communicator& group, Device& device) : group_(group) {
    if (!group.is_single()) group.use_channel(comm::make_blocking_channel(group, device, transfer_status()));
  }
  ~WithBlockingChannel() { group_.use_channel(nullptr); }
  WithBlockingChannel(const WithBlockingChannel&) = delete;
  WithBlockingChannel& operator=(const WithBlockingChannel&) = delete;

 private:
  comm::Communicator& group_;
};

// The same with a channel on the communicators of the device's backend.
class WithNcclChannel {
 public:
  WithNcclChannel(comm::Communicator& group, cuda::CudaDevice& device, double timeout = 60,
                  std::shared_ptr<comm::TransferWatch> watch = world().transfer_watch())
      : group_(group) {
    if (!group.is_single())
      group.use_channel(comm::make_nccl_channel(
          group, device, {.world_rank = world().rank(), .timeout = timeout, .watch = std::move(watch)}));
  }
  ~WithNcclChannel() { group_.use_channel(nullptr); }
  WithNcclChannel(const WithNcclChannel&) = delete;
  WithNcclChannel& operator=(const WithNcclChannel&) = delete;

 private:
  comm::Communicator& group_;
};

}  // namespace capstan::test
