// Hashes of a file while it streams by: one XXH3-128 for the whole (what `xxhsum -H2` prints) and one XXH3-64
// for each block, so that a difference can be named by its place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace capstan::checkpoint {

inline constexpr int64_t kBlockBytes = int64_t{4} << 20;

struct FileHash {
  int64_t bytes = 0;
  std::string full;                 // 32 lower-case hexadecimal digits
  std::vector<std::string> blocks;  // 16 digits each, ceil(bytes / block_bytes) of them
};

class Hasher {
 public:
  explicit Hasher(int64_t block_bytes = kBlockBytes);
  ~Hasher();
  void update(std::span<const std::byte> bytes);
  FileHash finish();  // once

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string hash_of(std::span<const std::byte> bytes);  // XXH3-128, 32 digits
std::string hash_of(std::string_view text);

// Reads the file with plain reads (a map of a file that shrinks meanwhile would end the process).
FileHash hash_file(const std::filesystem::path& path, int64_t block_bytes = kBlockBytes);

}  // namespace capstan::checkpoint
