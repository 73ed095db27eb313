#include "tensor/double_mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"

namespace capstan {

void fill_not_written(std::byte* begin, int64_t bytes) {
  fill_alternating(begin, bytes, std::byte{kNotWritten & 0xFF}, std::byte{kNotWritten >> 8});
}
void fill_alternating(std::byte* begin, int64_t bytes, std::byte first, std::byte second) {
  if (bytes > 0) begin[0] = first;
  if (bytes > 1) begin[1] = second;
  // Copies of what is there already, up to what the cache holds: a device that checks fills every block.
  constexpr int64_t kMost = 16 << 10;
  for (int64_t done = 2, next; done < bytes; done += next) {
    next = std::min({done, bytes - done, kMost});
    std::memcpy(begin + done, begin, static_cast<size_t>(next));
  }
}

DoubleMapping::DoubleMapping(std::string device, int64_t bytes, bool accessible)
    : device_(std::move(device)), bytes_(bytes) {
  file_ = ::memfd_create("capstan device memory", MFD_CLOEXEC);
  if (file_ < 0) refuse("memfd_create");
  if (::ftruncate(file_, bytes_) != 0) refuse("ftruncate");
  front_ = map(PROT_NONE);
  back_ = map(accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}
DoubleMapping::~DoubleMapping() {
  close();
}

bool DoubleMapping::allow(int64_t offset, int64_t bytes) {
  return ::mprotect(back_ + offset, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) == 0;
}
bool DoubleMapping::forbid(int64_t offset, int64_t bytes) {
  return ::mprotect(back_ + offset, static_cast<size_t>(bytes), PROT_NONE) == 0;
}
void DoubleMapping::discard(int64_t offset, int64_t bytes) {
  ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

std::byte* DoubleMapping::map(int access) {
  void* address = ::mmap(nullptr, static_cast<size_t>(bytes_), access, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (address == MAP_FAILED) refuse("mmap");
  ::madvise(address, static_cast<size_t>(bytes_), MADV_DONTDUMP);
  return static_cast<std::byte*>(address);
}
void DoubleMapping::refuse(const char* call) {
  const std::string reason = system_error_text(errno);
  close();
  fail(ErrorCode::unsupported, "the memory of the " + device_ + " cannot be made: " + call + ": " + reason,
       "train.device=cpu");
}
void DoubleMapping::close() {
  for (std::byte* mapping : {front_, back_})
    if (mapping) ::munmap(mapping, static_cast<size_t>(bytes_));
  if (file_ >= 0) ::close(file_);
}

}  // namespace capstan
