// The bytes of a file from front to back; .gz and .zst are decompressed on the way, within a budget.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace capstan::data {

struct InputLimits {
  // A compressed file may grow to free_bytes, and beyond that by max_expansion: more is taken for a bomb.
  int64_t free_bytes = int64_t{64} << 20;
  int64_t max_expansion = 250;
};

class InputStream {
 public:
  // By its name: .gz, .zst, otherwise plain. ErrorCode::not_found, ::format (not a regular file, or a Git LFS
  // pointer) or ::io.
  explicit InputStream(const std::string& path, InputLimits limits = {});
  ~InputStream();
  InputStream(const InputStream&) = delete;
  InputStream& operator=(const InputStream&) = delete;

  // Up to out.size() bytes; 0 at the end. A truncated or corrupt file is ErrorCode::format with the offset in
  // the file.
  size_t read(std::span<char> out);

  int64_t file_size() const;
  int64_t file_bytes_read() const;  // of the compressed file, where it is one

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
