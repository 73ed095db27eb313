// A directory of built indices (dataset.path_to_cache): arrays that are slow to build, each set in a file
// named by the hash of its key. Files are written completely and then renamed, so that any number of ranks
// and runs may share the directory. A file that is damaged, or has another key or size, is ignored and
// written again.
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
  // Creates the directory; throws ErrorCode::io if that fails.
  explicit IndexCache(std::filesystem::path directory);

  // Fills the arrays from the file of `key`, which describes everything that they depend on. Returns false if
  // there is no valid file.
  bool load(std::string_view key, std::initializer_list<std::span<std::byte>> arrays) const;
  // Writes the arrays. Ignores errors, after which the next start builds the arrays again.
  void store(std::string_view key, std::initializer_list<std::span<const std::byte>> arrays) const noexcept;

  std::filesystem::path file_of(std::string_view key) const;

 private:
  std::filesystem::path directory_;
};

}  // namespace capstan::data
