#include "comm/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "base/error.hpp"
#include "base/file.hpp"
#include "comm/collective_errors.hpp"

namespace capstan::comm {

SharedMemory::SharedMemory(Communicator& group, size_t bytes) : bytes_(bytes) {
  std::array<char, 64> name{"/dev/shm/capstan-transfers-XXXXXX"};
  const auto check = [&](bool ok, const char* what) {
    if (!ok) fail(ErrorCode::io, std::string(what) + " `" + name.data() + "`: " + system_error_text(errno));
  };
  int file = -1;
  run_collectively(group, "sharing memory between ranks", [&] {
    if (group.rank() != 0) return;
    file = ::mkostemp(name.data(), O_CLOEXEC);
    check(file >= 0, "cannot create");
    // Reserves the space: a full file system would end the process at a store.
    errno = ::posix_fallocate(file, 0, static_cast<off_t>(bytes));
    check(errno == 0, "no space for");
  });
  group.broadcast(name.data(), static_cast<int64_t>(name.size()), 0);
  run_collectively(group, "sharing memory between ranks", [&] {
    if (group.rank() != 0) file = ::open(name.data(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    check(file >= 0, "cannot open");
    memory_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    check(memory_ != MAP_FAILED, "cannot map");
  });
  ::close(file);
  // The memory lives until the last process unmaps it.
  if (group.rank() == 0) ::unlink(name.data());
}

SharedMemory::~SharedMemory() {
  ::munmap(memory_, bytes_);
}

}  // namespace capstan::comm
