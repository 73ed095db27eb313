// Reads any region of any tensor of a checkpoint, whatever layout wrote it.
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

// How thoroughly a checkpoint is verified.
enum class Verification : uint8_t {
  // Checks the manifest, its hash, and the presence and sizes of all files.
  structure,
  // Checks the hash of every file as well.
  content,
};

class Reader final : public TensorSource {
 public:
  // Throws ErrorCode::not_found when there is no checkpoint, ::format when it fails the verification (naming
  // file and block), ::unsupported when a later version wrote it.
  static Reader open(const std::filesystem::path& directory, Verification verification);

  const std::filesystem::path& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  const SaveInfo& info() const { return manifest_.info; }
  std::string description() const override;
  std::vector<std::string> names() const override;
  const StoredTensor* find(std::string_view name) const override;
  // Reads from all chunks that overlap the region. Maps only the files it needs; a file that contradicts the
  // manifest is ErrorCode::format.
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

  // A file other than the shards (state.json, recipe.yaml, tokenizer.json). Its hash is always verified.
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
