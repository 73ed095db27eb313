// The kernel tests on the CUDA kernels of a GPU. The tests pass addresses of the host's memory to the
// kernels: here the heap and the stack of the tests lie in pinned memory, which a GPU reads and writes at the
// same addresses, and a launch returns after its kernel has run.
#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "tensor/cuda_library.hpp"
#include "tests/kernels/pinned_heap.hpp"
#include "tests/kernels/support.hpp"

namespace {

constinit capstan::test::PinnedHeap heap;

void* allocate(size_t bytes, size_t alignment) {
  if (heap.is_open()) return heap.allocate(bytes, alignment);
  void* const data = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
  if (!data) throw std::bad_alloc();
  return data;
}
void release(void* data) noexcept {
  if (heap.owns(data))
    heap.free(data);
  else
    std::free(data);
}

}  // namespace

void* operator new(size_t bytes) {
  return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* data) noexcept {
  release(data);
}
void operator delete(void* data, size_t) noexcept {
  release(data);
}
void operator delete(void* data, std::align_val_t) noexcept {
  release(data);
}
void operator delete(void* data, size_t, std::align_val_t) noexcept {
  release(data);
}

namespace capstan::test {

namespace {

constexpr size_t kHeap = size_t{2} << 30, kStack = size_t{16} << 20;

struct Run {
  doctest::Context& context;
  int result = 1;
};

}  // namespace

// All cases are of the GPU (main.cpp).
bool runs_on_gpu() {
  return true;
}
std::string gpu_problem() {
  // Before the first call of the driver, which reads it then: a launch returns after its kernel has run.
  ::setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  const cuda::Library& library = cuda::library();
  if (!library.backend) return library.reason;
  int32_t devices = 0;
  const cuda::Status counted = library.backend->runtime->count_devices(&devices);
  if (counted.ok()) return "";
  return counted.text ? counted.text : "the CUDA backend finds no device";
}

int run_cases(doctest::Context& context) {
  const cuda::Runtime& runtime = *cuda::library().backend->runtime;
  cuda::OpenDevice* device = nullptr;
  void* memory = nullptr;
  cuda::Status status = runtime.open_device(0, &device);
  if (status.ok()) status = runtime.allocate_pinned(device, kHeap + kStack, &memory);
  if (!status.ok()) {
    std::printf("%s\n", status.text);
    return 1;
  }
  auto* const stack = static_cast<std::byte*>(memory) + kHeap;
  heap.open(static_cast<std::byte*>(memory), kHeap);
  Run run{context};
  pthread_attr_t attributes;
  pthread_t thread;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setstack(&attributes, stack, kStack);
  const auto body = [](void* argument) -> void* {
    Run& of_thread = *static_cast<Run*>(argument);
    of_thread.result = of_thread.context.run();
    return nullptr;
  };
  if (::pthread_create(&thread, &attributes, body, &run) != 0) return 1;
  ::pthread_join(thread, nullptr);
  // The driver goes before what lies in its memory.
  std::fflush(nullptr);
  std::_Exit(run.result);
}

}  // namespace capstan::test

namespace capstan::testing {

const kernels::Table& table() {
  return *cuda::library().backend->table;
}
std::string kernel_folder() {
  return "kernels/cuda/";
}
// The sizes of a simulation, where compute-sanitizer runs the kernels (scripts/gpu_check.sh).
bool are_simulated() {
  return std::getenv("CAPSTAN_TEST_SMALL") != nullptr;
}
std::optional<uint64_t> third_of_cases() {
  return std::nullopt;
}
bool rounds_attention_weights() {
  return true;
}
size_t workspace_bytes() {
  return size_t{64} << 20;
}
bool reads_heap_alone() {
  return true;
}
void prepare_launch(int) {}

}  // namespace capstan::testing
