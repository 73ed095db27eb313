// What every kernel gets: the pool it may use and scratch memory. Kernels never allocate and never throw for user errors:
// the operation has checked the shapes.
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

// A read-only or writable array of a run-time element type (fp32 or bf16 where a kernel says nothing else).
struct In {
  const void* data = nullptr;
  DType dtype = DType::f32;
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  explicit operator bool() const { return data != nullptr; }
};
struct Out {
  void* data = nullptr;
  DType dtype = DType::f32;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  explicit operator bool() const { return data != nullptr; }
  operator In() const { return {data, dtype}; }  // NOLINT: what may be written may be read
};

// What a kernel asks of Context::scratch for a shape: bytes for the launch, and for each worker.
struct WorkspaceSize {
  size_t shared = 0, each_worker = 0;
};

class Context {
 public:
  ThreadPool* pool = nullptr;  // host devices
  void* stream = nullptr;      // accelerator devices

  // Scratch of one worker (or of the launch: worker = kShared), 64-byte aligned, kept between launches; it grows to the
  // largest request and then never asks the system again. Contents are undefined. Throws ErrorCode::no_fit when the system
  // refuses; the worker's scratch is empty then and may be asked for again.
  static constexpr int kShared = -1;
  std::byte* scratch(int worker, size_t bytes);
  template <class T>
  T* scratch_of(int worker, size_t count) {
    return reinterpret_cast<T*>(scratch(worker, count * sizeof(T)));
  }
  // The account without the memory: as if a kernel with that need had run on `workers` threads.
  void reserve_workspace(WorkspaceSize need, int workers);
  // To be called before parallel work asks for scratch from several workers.
  void prepare(int workers);
  // Of all workers together, and at most what they had at any time: it never shrinks but by a refusal. From any thread.
  size_t scratch_bytes() const { return total_.load(std::memory_order_relaxed); }

 private:
  static size_t grown(size_t bytes) {
    return bytes + bytes / 4;
  }  // so that slightly larger needs find it there
  struct Block {
    std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, std::free};
    size_t bytes = 0;
  };
  std::vector<Block> blocks_;
  std::atomic<size_t> total_{0};  // kernels may run on another thread than who asks how much they keep
};

}  // namespace capstan::kernels
