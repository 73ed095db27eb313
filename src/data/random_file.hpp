// A regular file read at any offset with pread(2). Unlike a map, a file that shrinks while it is read gives
// an error, not a signal. Reads from several threads at once are fine.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace capstan::data {

class RandomFile {
 public:
  explicit RandomFile(std::string path);  // not_found, format (not a regular file) or io
  ~RandomFile();
  RandomFile(RandomFile&& other) noexcept;
  RandomFile& operator=(RandomFile&& other) noexcept;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened

  // Fills `out` from `offset`; a file that ends before is a format error that names the offset.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

}  // namespace capstan::data
