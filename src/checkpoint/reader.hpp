// Reading a checkpoint: any rectangle of any tensor, whatever the layout that wrote it.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest.hpp"
#include "checkpoint/safetensors.hpp"
#include "checkpoint/tensor_source.hpp"

namespace capstan::checkpoint {

// How much is checked before anything is believed.
enum class Depth : uint8_t {
  structure,  // manifest and its hash, all files there with their sizes, no others: no data is read
  content,    // and the hash of every file
};

class Reader final : public TensorSource {
 public:
  // Throws ErrorCode::not_found when there is no checkpoint, ::format when it fails the check (naming file
  // and block),
  // ::unsupported when a later version wrote it.
  static Reader open(const std::filesystem::path& directory, Depth depth);

  const std::filesystem::path& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  const SaveInfo& info() const { return manifest_.info; }
  std::string place() const override;
  std::vector<std::string> names() const override;
  const StoredTensor* find(std::string_view name) const override;
  // From whichever pieces hold the cells. Opens (maps) only the files it needs; a shard that contradicts the manifest is
  // ErrorCode::format.
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

  // A file beside the shards (state.json, recipe.yaml, tokenizer.json); its hash is checked at every depth.
  bool has_file(std::string_view file_name) const;
  std::string read_text(std::string_view file_name) const;

 private:
  Reader() = default;
  const SafetensorsFile& shard(const std::string& file_name);

  std::filesystem::path directory_;
  Manifest manifest_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> shards_;
};

}  // namespace capstan::checkpoint
