// Incremental hashes of a file: one XXH3-128 of the full file (as `xxhsum -H2` prints it) and one XXH3-64 of
// each block, which locates a difference.
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
  // XXH3-128 of the file, 32 lower-case hexadecimal digits.
  std::string full;
  // XXH3-64 of each block, 16 digits each; ceil(bytes / block_bytes) of them.
  std::vector<std::string> blocks;
};

class Hasher {
 public:
  explicit Hasher(int64_t block_bytes = kBlockBytes);
  ~Hasher();
  void update(std::span<const std::byte> bytes);
  // Returns the hashes. May be called once.
  FileHash finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// XXH3-128, 32 lower-case hexadecimal digits.
std::string hash_of(std::span<const std::byte> bytes);
std::string hash_of(std::string_view text);

// Reads the file with plain reads, because a mapped file that shrinks meanwhile would end the process.
FileHash hash_file(const std::filesystem::path& path, int64_t block_bytes = kBlockBytes);

}  // namespace capstan::checkpoint
