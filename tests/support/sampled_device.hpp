// A device for launches of real sizes on any machine. Its blocks are addresses that the system backs with
// memory where a kernel writes; pages behind each block are inaccessible. It runs a sample of each CUDA
// kernel (kernels/simulated/sample.hpp), and is a meta device for all else: the host reads no values, and
// copies of more than a few MiB do nothing.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernels/simulated/cublaslt.hpp"
#include "kernels/simulated/sample.hpp"
#include "tensor/cuda_device.hpp"
#include "tensor/device.hpp"

namespace capstan::test {

// A range of addresses without memory.
class ReservedAddresses {
 public:
  explicit ReservedAddresses(int64_t bytes);
  ~ReservedAddresses();
  ReservedAddresses(const ReservedAddresses&) = delete;
  ReservedAddresses& operator=(const ReservedAddresses&) = delete;

  std::byte* at(int64_t offset) const { return begin_ + offset; }
  int64_t bytes() const { return bytes_; }

 private:
  const int64_t bytes_;
  std::byte* begin_;
};

class SampledDevice final : public Device {
 public:
  explicit SampledDevice(const kernels::simulated::Sample& sample = {});
  ~SampledDevice() override;

  DeviceType type() const override { return DeviceType::meta; }
  bool queues_work() const override { return true; }
  LaunchMode launch_mode(const void* kernel) const override;
  void synchronize() override {}
  std::byte* host_address(std::byte*) override { return nullptr; }
  void zero(std::byte* data, int64_t bytes) override;
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override;
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override;
  // From and to pinned memory, of which a meta device has none.
  void start_copy_to_device(std::byte*, const void*, int64_t, Queue) override {}
  void start_copy_to_host(void*, const std::byte*, int64_t, Queue) override {}
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override;

  // What lies at an address: "4096 bytes after a block of 512 bytes (activations)".
  std::string text_of(const void* address) const;
  // An access outside of the blocks ends the process from now on, after it has written the launch, the block
  // of threads and text_of() to the standard error.
  void report_faults();

 protected:
  int workers() const override { return 0; }
  bool grow(Pool, int64_t, int64_t) override { return true; }
  void shrink(Pool, int64_t, int64_t) override {}
  std::byte* place(Pool pool, int64_t offset, int64_t size) override;
  void occupy(std::byte* data, int64_t bytes, int64_t size, MemoryCategory category) override;
  void retire(std::byte* data, int64_t size) override;
  // Never dereferenced.
  std::byte* place_pinned(int64_t) override { return reinterpret_cast<std::byte*>(uintptr_t{1} << 12); }
  void retire_pinned(std::byte*) override {}

 private:
  struct Block {
    int64_t bytes;
    MemoryCategory category;
  };

  const kernels::simulated::SampledLaunches sampled_;
  const kernels::simulated::SizesOfGpu sizes_;
  ReservedAddresses small_, large_;
  std::map<const std::byte*, Block> blocks_;
};

}  // namespace capstan::test
