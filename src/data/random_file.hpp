// A regular file read at any offset with pread(2). Unlike a map, a file that shrinks while it is read gives
// an error, not a signal. Reads from several threads at once are fine.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace capstan::data {

class RandomFile {
 public:
  // Throws ErrorCode::not_found, ::format (no stored file) or ::io.
  explicit RandomFile(std::string path);
  ~RandomFile();
  RandomFile(RandomFile&& other) noexcept;
  RandomFile& operator=(RandomFile&& other) noexcept;

  const std::string& path() const { return path_; }
  // Size of the file when it was opened, in bytes.
  int64_t size() const { return size_; }

  // Fills `out` from `offset`. Throws ErrorCode::format, with the offset, if the file ends before.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

}  // namespace capstan::data
