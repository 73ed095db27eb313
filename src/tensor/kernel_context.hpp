// The interface between a Device and its kernels: the arrays that a kernel takes, and the Context with the
// thread pool and the scratch memory that it may use. Kernels never allocate; the operations check shapes
// before they launch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/thread_pool.hpp"
#include "tensor/dtype.hpp"

namespace capstan::kernels {

// A read-only array of a run-time element type (fp32 or bf16 unless a kernel's comment says otherwise).
struct In {
  const void* data = nullptr;
  DType dtype = DType::f32;
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  explicit operator bool() const { return data != nullptr; }
};
// A writable array of a run-time element type.
struct Out {
  void* data = nullptr;
  DType dtype = DType::f32;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  explicit operator bool() const { return data != nullptr; }
  operator In() const { return {data, dtype}; }  // NOLINT: an implicit conversion on purpose
};

// Scratch memory that a kernel needs for a shape.
struct WorkspaceSize {
  size_t shared = 0, each_worker = 0;  // bytes
};

class Context {
 public:
  ThreadPool* pool = nullptr;  // host devices
  void* stream = nullptr;      // accelerator devices

  // Scratch memory of one worker (kShared: of the launch), 64-byte aligned, with undefined contents. It is
  // kept between launches and grows to the largest request. Throws ErrorCode::no_fit when the system refuses
  // memory; the worker's scratch is then empty and can be requested again.
  static constexpr int kShared = -1;
  std::byte* scratch(int worker, size_t bytes);
  template <class T>
  T* scratch_of(int worker, size_t count) {
    return reinterpret_cast<T*>(scratch(worker, count * sizeof(T)));
  }
  // Counts scratch memory as if a kernel with this need had run on `workers` threads, without allocating it.
  void reserve_workspace(WorkspaceSize need, int workers);
  // Call before parallel work requests scratch for several workers.
  void prepare(int workers);
  // The scratch memory of all workers. May be called from any thread.
  size_t scratch_bytes() const { return total_.load(std::memory_order_relaxed); }

 private:
  // Rounds up, so that slightly larger requests need no new memory.
  static size_t grown(size_t bytes) { return bytes + bytes / 4; }
  struct Block {
    std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, std::free};
    size_t bytes = 0;
  };
  std::vector<Block> blocks_;
  std::atomic<size_t> total_{// Bytes; kernels may run on another thread than the caller of scratch_bytes().
                             0};
};

}  // namespace capstan::kernels
