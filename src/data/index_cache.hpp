// A directory of built indices (dataset.path_to_cache): arrays that took long to build, each set in a file
// named by the hash of its key. Files are written whole and renamed, so that any number of ranks and runs may
// share the directory; one that is damaged, of another key or of another size counts as absent and is written
// again.
#pragma once

#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace capstan::data {

class IndexCache {
 public:
  // Creates the directory; ErrorCode::io where that fails.
  explicit IndexCache(std::filesystem::path directory);

  // `key` describes everything that the arrays depend on. Fills them and returns true where they are there,
  // with their hash.
  bool load(std::string_view key, std::initializer_list<std::span<std::byte>> arrays) const;
  // A file that cannot be written is no error: the next start builds the arrays again.
  void store(std::string_view key, std::initializer_list<std::span<const std::byte>> arrays) const noexcept;

  std::filesystem::path file_of(std::string_view key) const;

 private:
  std::filesystem::path directory_;
};

}  // namespace capstan::data
