// The bytes of a file from front to back; .gz and .zst are decompressed on the way, within a budget.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace capstan::data {

struct InputLimits {
  // A compressed file may expand to free_bytes, and beyond that by the factor max_expansion. A file that
  // expands more is rejected as a decompression bomb.
  int64_t free_bytes = int64_t{64} << 20;
  int64_t max_expansion = 250;
};

class InputReader {
 public:
  // Opens a file by its name: .gz, .zst, otherwise plain. ErrorCode::not_found, ::format (not a regular file,
  // or a Git LFS pointer) or ::io.
  explicit InputReader(const std::string& path, InputLimits limits = {});
  ~InputReader();
  InputReader(const InputReader&) = delete;
  InputReader& operator=(const InputReader&) = delete;

  // Reads up to out.size() bytes and returns their number, 0 at the end. Throws ErrorCode::format, with the
  // offset, for a truncated or corrupt file.
  size_t read(std::span<char> out);

  int64_t file_size() const;
  // Bytes as stored: of the compressed file, if it is compressed.
  int64_t file_bytes_read() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
