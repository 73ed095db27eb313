#include "data/random_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"

namespace capstan::data {

RandomFile::RandomFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a named pipe must not wait for a writer.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ < 0) {
    if (errno == ENOENT || errno == ENOTDIR) fail_not_found("file", path_);
    fail(ErrorCode::io, "cannot open `" + path_ + "`: " + system_error_text(errno));
  }
  struct stat status {};
  try {
    if (::fstat(fd_, &status) != 0)
      fail(ErrorCode::io, "cannot read `" + path_ + "`: " + system_error_text(errno));
    require_stored_file(fd_, path_);
  } catch (...) {
    ::close(std::exchange(fd_, -1));
    throw;
  }
  size_ = status.st_size;
}

RandomFile::~RandomFile() {
  if (fd_ >= 0) ::close(fd_);
}
RandomFile::RandomFile(RandomFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
RandomFile& RandomFile::operator=(RandomFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

void RandomFile::read(int64_t offset, std::span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd_, out.data() + done, out.size() - done,
                                static_cast<off_t>(offset + static_cast<int64_t>(done)));
    if (got < 0) {
      if (errno == EINTR) continue;
      fail(ErrorCode::io, "cannot read `" + path_ + "`: " + system_error_text(errno));
    }
    if (got == 0)
      fail(ErrorCode::format, path_ + ": offset " + std::to_string(offset + static_cast<int64_t>(done)) +
                                  ": the file ends here, but " + std::to_string(out.size() - done) +
                                  " more bytes are needed");
    done += static_cast<size_t>(got);
  }
}

}  // namespace capstan::data
