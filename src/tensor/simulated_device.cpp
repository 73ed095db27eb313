#include "tensor/simulated_device.hpp"

#include <string>
#include <utility>

#include "tensor/double_mapping.hpp"
#include "tensor/simulated_runtime.hpp"

namespace capstan::cuda {

namespace {

const Backend& simulated_backend() {
  static const Backend backend{.interface = "simulated", .runtime = &simulated_runtime()};
  return backend;
}

// Between two blocks lies as much memory as the first one has, at least the 512 bytes of the smallest: the
// sentinels of both.
constexpr CudaDevice::Variant kVariant{.name = "simulated", .spacing = 2, .first = 2 * Sentinels::kBytes};
static_assert(AllocatorRules().small_rounding >= 2 * Sentinels::kBytes);

const kernels::Table& prepare(const SimulatedKernels& kernels, const SimulatedOptions& options) {
  set_simulated_gpu({.memory = options.memory, .seed = options.seed, .patient = options.patient});
  return *kernels.table;
}

}  // namespace

SimulatedDevice::SimulatedDevice(const SimulatedKernels& kernels, const SimulatedOptions& options, int index)
    : SimulatedDevice(simulated_backend(), kernels, options, index) {}

SimulatedDevice::SimulatedDevice(const Backend& backend, const SimulatedKernels& kernels,
                                 const SimulatedOptions& options, int index)
    : CudaDevice(backend, prepare(kernels, options), index, options.threads, kVariant),
      kernels_(kernels),
      sentinels_(simulated_kernel_offset(), allocator_rules()) {
  kernel_offset_ = simulated_kernel_offset();
  for (size_t queue = 0; queue < kQueues; ++queue) {
    streams_[queue].device = this;
    streams_[queue].queue = static_cast<Queue>(queue);
  }
}

void SimulatedDevice::synchronize() {
  check_sentinels();
  CudaDevice::synchronize();
}

void SimulatedDevice::copy_to_host(void* to_host, const std::byte* from, int64_t bytes) {
  check_sentinels();
  CudaDevice::copy_to_host(to_host, from, bytes);
}

void SimulatedDevice::check_sentinels() {
  enqueue_always(Queue::compute, sentinels_.check(launches()));
}

void SimulatedDevice::begin_workspace(Queue queue, kernels::Workspace workspace) {
  enqueue(queue, sentinels_.begin_workspace(workspace, queue != Queue::compute));
}
void SimulatedDevice::end_workspace(Queue queue, kernels::Workspace workspace) {
  enqueue(queue, sentinels_.end_workspace(workspace, launches(queue), std::string(name_of(queue))));
}
void SimulatedDevice::occupy(std::byte* data, int64_t bytes, int64_t size, MemoryCategory category) {
  enqueue_always(Queue::compute, sentinels_.add(data, bytes, size + Sentinels::kBytes, category, launches()));
}
void SimulatedDevice::retire(std::byte* data, int64_t size) {
  enqueue_always(Queue::compute, sentinels_.remove(data, launches()));
  enqueue(Queue::compute, [to = kernel_address(data), size] { fill_not_written(to, size); });
}

}  // namespace capstan::cuda
