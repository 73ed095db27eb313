// Memory for the workspaces of launches in tests: every byte has one value again after reset(), which takes
// time for the pages that were written and not for all 8 MiB. It is a private mapping of a file of such
// bytes, and a reset drops its written pages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace capstan::testing {

class WorkspaceMemory {
 public:
  WorkspaceMemory() = default;
  WorkspaceMemory(size_t bytes, unsigned char value) : bytes_(bytes) {
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
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  WorkspaceMemory& operator=(WorkspaceMemory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~WorkspaceMemory() {
    if (data_) ::munmap(data_, bytes_);
  }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void reset() {
    if (::madvise(data_, bytes_, MADV_DONTNEED) != 0) fail();
  }

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("no memory for the workspace of a test"); }

  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace capstan::testing
