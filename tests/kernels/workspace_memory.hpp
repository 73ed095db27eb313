// Memory for the workspaces of launches in tests: every byte has one value again after reset(), which takes
// time for the pages that were written and not for all 8 MiB. It is a private mapping of a file of such
// bytes, and a reset drops its written pages. A GPU cannot access such a mapping: there it is a block of the
// heap (gpu_table.cpp), of which reset() fills the first MiB, because only cuBLASLt takes more at the sizes
// of the tests.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace capstan::testing {

class WorkspaceMemory {
 public:
  WorkspaceMemory() = default;
  WorkspaceMemory(size_t bytes, unsigned char value, bool on_heap)
      : bytes_(bytes), value_(value), on_heap_(on_heap) {
    if (on_heap) {
      data_ = static_cast<char*>(::operator new(bytes, kPage));
      std::memset(data_, value, bytes);
      return;
    }
    const int file = ::memfd_create("workspace", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) fail();
    if (value != 0) {
      void* const all = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (all == MAP_FAILED) fail();
      std::memset(all, value, bytes);
      ::munmap(all, bytes);
    }
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    ::close(file);
    if (mapped == MAP_FAILED) fail();
    data_ = static_cast<char*>(mapped);
  }
  WorkspaceMemory(WorkspaceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        value_(other.value_),
        on_heap_(other.on_heap_) {}
  WorkspaceMemory& operator=(WorkspaceMemory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    std::swap(value_, other.value_), std::swap(on_heap_, other.on_heap_);
    return *this;
  }
  ~WorkspaceMemory() {
    if (!data_) return;
    if (on_heap_)
      ::operator delete(data_, kPage);
    else
      ::munmap(data_, bytes_);
  }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void reset() {
    if (on_heap_)
      std::memset(data_, value_, std::min(bytes_, size_t{1} << 20));
    else if (::madvise(data_, bytes_, MADV_DONTNEED) != 0)
      fail();
  }

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("no memory for the workspace of a test"); }

  static constexpr std::align_val_t kPage{4096};
  char* data_ = nullptr;
  size_t bytes_ = 0;
  unsigned char value_ = 0;
  bool on_heap_ = false;
};

}  // namespace capstan::testing
