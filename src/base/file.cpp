#include "base/file.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/missing.hpp"

namespace capstan {

namespace fs = std::filesystem;

std::string system_error_text(int error_number) {
  return std::generic_category().message(error_number);
}

[[noreturn]] static void fail_io(const char* action, const fs::path& path, int error_number) {
  const bool missing = error_number == ENOENT || error_number == ENOTDIR;
  if (missing && std::strcmp(action, "open") == 0) fail_not_found("", path.string());
  fail(missing ? ErrorCode::not_found : ErrorCode::io,
       std::string("cannot ") + action + " `" + path.string() + "`: " + system_error_text(error_number));
}

namespace {
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags, mode_t mode, const char* action)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
    if (fd_ < 0) fail_io(action, path, errno);
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

uint64_t regular_size(int fd, const fs::path& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail_io("read", path, errno);
  if (S_ISDIR(status.st_mode)) fail(ErrorCode::format, "`" + path.string() + "` is a directory, not a file");
  if (!S_ISREG(status.st_mode)) fail(ErrorCode::format, "`" + path.string() + "` is not a regular file");
  return static_cast<uint64_t>(status.st_size);
}
}  // namespace

std::string read_file(const fs::path& path, uint64_t limit) {
  // O_NONBLOCK: opening a named pipe must not wait for a writer.
  const Descriptor file(path, O_RDONLY | O_NONBLOCK, 0, "open");
  const uint64_t size = regular_size(file.get(), path);
  if (size > limit)
    fail(ErrorCode::format, "`" + path.string() + "` has " + std::to_string(size) + " bytes; the limit is " +
                                std::to_string(limit));
  std::string content(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(file.get(), content.data() + done, size - done);
    if (got < 0) {
      if (errno == EINTR) continue;
      fail_io("read", path, errno);
    }
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  content.resize(done);
  return content;
}

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  const Descriptor file(path, O_RDONLY | O_NONBLOCK, 0, "open");
  size_ = regular_size(file.get(), path);
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) fail_io("map", path, errno);
  data_ = static_cast<const std::byte*>(address);
}
MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}
MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}
MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}
void MappedFile::advise_sequential() const {
  if (data_) ::madvise(const_cast<std::byte*>(data_), size_, MADV_SEQUENTIAL);
}
void MappedFile::release(std::span<const std::byte> part) const {
  if (part.empty()) return;
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGE_SIZE));
  const size_t begin = static_cast<size_t>(part.data() - data_) / page * page;
  const size_t end = static_cast<size_t>(part.data() - data_) + part.size();
  ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

FileWriter::FileWriter(const fs::path& path, size_t buffer_bytes)
    : path_(path),
      fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(buffer_bytes)),
      capacity_(buffer_bytes) {
  if (fd_ < 0) fail_io("create", path, errno);
}
FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}
static void write_all(int fd, const std::byte* data, size_t size, const fs::path& path) {
  while (size > 0) {
    const ssize_t put = ::write(fd, data, size);
    if (put < 0) {
      if (errno == EINTR) continue;
      fail_io("write", path, errno);
    }
    data += put;
    size -= static_cast<size_t>(put);
  }
}
void FileWriter::flush() {
  write_all(fd_, buffer_.get(), used_, path_);
  used_ = 0;
}
void FileWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() >= capacity_) {
    flush();
    write_all(fd_, bytes.data(), bytes.size(), path_);
    return;
  }
  if (used_ + bytes.size() > capacity_) flush();
  if (!bytes.empty()) std::memcpy(buffer_.get() + used_, bytes.data(), bytes.size());
  used_ += bytes.size();
}
void FileWriter::finish(bool sync) {
  flush();
  // A failed fsync may have dropped the pages: it is never tried again on the same descriptor.
  if (sync && ::fsync(fd_) != 0) fail_io("sync", path_, errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail_io("close", path_, errno);
}

void sync_directory(const fs::path& path) {
  const Descriptor directory(path.empty() ? fs::path(".") : path, O_RDONLY | O_DIRECTORY, 0,
                             "open directory");
  if (::fsync(directory.get()) != 0) fail_io("sync directory", path, errno);
}

void write_file_durably(const fs::path& path, std::string_view content) {
  // A rename would put a file in the place of /dev/stdout.
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    fail(ErrorCode::format, "`" + path.string() + "` is not a regular file");
  const fs::path temporary = path.string() + ".tmp." + std::to_string(::getpid());
  try {
    FileWriter writer(temporary, 1 << 16);
    writer.write(content);
    writer.finish();
  } catch (Error& error) {
    throw error.in("while writing `" + path.string() + "`");
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail_io("rename", temporary, errno);
  sync_directory(path.parent_path());
}

void rename_new(const fs::path& from, const fs::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) != 0)
    fail_io("rename", from, errno);
  sync_directory(to.parent_path());
}

}  // namespace capstan
