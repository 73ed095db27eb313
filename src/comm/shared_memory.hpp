// Memory that the members of a group on one host share.
#pragma once

#include <cstddef>

#include "comm/communicator.hpp"

namespace capstan::comm {

class SharedMemory {
 public:
  // The memory is zero at first. Collective over the group, whose members are on one host. ErrorCode::io
  // where the system refuses it.
  SharedMemory(Communicator& group, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  void* memory_ = nullptr;
  size_t bytes_;
};

}  // namespace capstan::comm
