// The interface between a Device and its kernels: the arrays that a kernel takes, and the Context with its
// resources (threads or a stream, and a workspace). Kernels never allocate; the operations check shapes
// before they launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.hpp"

namespace capstan {
class ThreadPool;
}

namespace capstan::kernels {

// A read-only array of a run-time element type (fp32, bf16 or fp16 unless a kernel's comment says otherwise).
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

// Temporary memory that a kernel needs for a shape, in bytes: `shared` for the launch, and `each_worker` for
// every thread that runs it (0 on an accelerator). A family declares it in a function NAME_workspace beside
// the kernel NAME.
struct WorkspaceSize {
  size_t shared = 0, each_worker = 0;

  // Parts begin at cache lines.
  static constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
  // Bytes of a launch: the shared part, then a part for each worker.
  size_t total(int workers) const {
    return aligned(shared) + static_cast<size_t>(workers) * aligned(each_worker);
  }
};

// Temporary memory of one launch, 64-byte aligned, with undefined contents.
struct Workspace {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// A kernel that cannot run reports it here and returns, because exceptions do not leave an accelerator. It
// lies in memory that the host and the kernels of a queue can access. A queue of a host device checks it
// after every kernel, an accelerator when the host waits.
struct KernelError {
  // Null: no error.
  const char* file = nullptr;
  const char* function = nullptr;
  // Bytes of workspace.
  size_t needed = 0, given = 0;
  // Why it cannot run; null: the workspace is too small.
  const char* reason = nullptr;
};

// The resources of a launch.
struct LaunchContext {
  // Threads of a host device; null on accelerators.
  ThreadPool* pool = nullptr;
  // Stream of an accelerator; null on host devices.
  void* stream = nullptr;
  Workspace workspace;
  KernelError* error = nullptr;
};
// Kernels take it as `Context&`: they cannot change it.
using Context = const LaunchContext;

}  // namespace capstan::kernels
