// Checks that Device::host_waits() counts each wait of the host, and no other call.
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan::test {

inline void check_host_waits(Device& device) {
  const std::vector<float> values{1, 2, 3};
  const Tensor tensor = Tensor::from_host<float>(device, {3}, values);
  std::array<float, 3> copy{};
  device.wait_for(Queue::device_to_host, *device.record(Queue::compute));
  device.start_copy_to_host(copy.data(), tensor.address(), tensor.bytes(), Queue::device_to_host);
  const auto copied = device.record(Queue::device_to_host);
  (void)copied->done();
  device.zero(tensor.address(), 0);
  (void)device.record_time(Queue::compute);
  CHECK(device.host_waits() == 0);
  copied->wait();
  CHECK(device.host_waits() == 1);
  CHECK(copy[2] == 3);
  CHECK(tensor.to_host<float>() == values);
  CHECK(device.host_waits() == 2);
  device.synchronize();
  CHECK(device.host_waits() == 3);
  device.record_time(Queue::compute)->wait();
  CHECK(device.host_waits() == 4);
}

}  // namespace capstan::test
