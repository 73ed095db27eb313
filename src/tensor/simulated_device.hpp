// The device `simulated`: CudaDevice on a runtime of the host (simulated_runtime.hpp). The CUDA kernels,
// compiled for the host, enqueue themselves on its streams. It finds what a GPU would not report: host code
// that uses device memory crashes, memory that was not written is NaN, kernels that write outside of their
// blocks are named (sentinels.hpp), and every queue is delayed.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_set>

#include "tensor/cuda_device.hpp"
#include "tensor/host_stream.hpp"
#include "tensor/sentinels.hpp"

namespace capstan::cuda {

// The kernels of a simulated device, which they outlive.
struct SimulatedKernels {
  const kernels::Table* table = nullptr;
  // Kernels that enqueue themselves, as CUDA kernels do; the device queues all others.
  std::unordered_set<const void*> stream_kernels;
};

struct SimulatedOptions {
  // Threads of the host.
  int threads = 1;
  // Seed of the delays.
  uint64_t seed = 1;
  // No work runs until a wait needs it: finds every missing wait.
  bool patient = false;
  // Bytes, of which sentinels take a half.
  int64_t memory = int64_t{32} << 30;
};

class SimulatedDevice final : public CudaDevice {
 public:
  // index: in the device's name.
  SimulatedDevice(const SimulatedKernels& kernels, const SimulatedOptions& options, int index = 0);
  // On another backend, whose runtime is the simulated one or is made of its functions.
  SimulatedDevice(const Backend& backend, const SimulatedKernels& kernels, const SimulatedOptions& options,
                  int index = 0);

  DeviceType type() const override { return DeviceType::simulated; }
  LaunchMode launch_mode(const void* kernel) const override {
    return kernels_.stream_kernels.contains(kernel) ? LaunchMode::call : LaunchMode::queue;
  }
  void synchronize() override;
  void copy_to_host(void* to_host, const std::byte* from, int64_t bytes) override;

 protected:
  ThreadPool* kernel_threads() override { return host_threads_; }
  void* stream_of(Queue queue) override {
    collect_graph(queue);
    return &streams_[static_cast<size_t>(queue)];
  }
  void begin_workspace(Queue queue, kernels::Workspace workspace) override;
  void end_workspace(Queue queue, kernels::Workspace workspace) override;
  void occupy(std::byte* data, int64_t bytes, int64_t size, MemoryCategory category) override;
  void retire(std::byte* data, int64_t size) override;

 private:
  class Stream final : public HostStream {
   public:
    SimulatedDevice* device = nullptr;
    Queue queue = Queue::compute;
    void enqueue(std::function<void()> work) override { device->enqueue(queue, std::move(work)); }
  };
  void check_sentinels();

  const SimulatedKernels& kernels_;
  std::array<Stream, kQueues> streams_;
  Sentinels sentinels_;
};

}  // namespace capstan::cuda
