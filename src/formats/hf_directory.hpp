// A model directory of Hugging Face Transformers: config.json, safetensors files, a tokenizer. Untrusted: no
// code in it is run, file names are plain, and links must stay inside of it (or of the `blobs` of the hub's
// cache, whose files are all links).
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/safetensors.hpp"
#include "checkpoint/tensor_source.hpp"

namespace capstan::formats {

inline constexpr std::string_view kConfigFile = "config.json";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";
inline constexpr std::string_view kSingleFile = "model.safetensors";
// Marks a checkpoint whose weights were imported without the family's name prefix, so that exports omit it
// too.
inline constexpr std::string_view kNamesFile = "hf-names.txt";

// The auxiliary files that Transformers reads with the weights.
std::span<const std::string_view> asset_files();
// Whether the file holds a tokenizer's vocabulary.
bool is_tokenizer_file(std::string_view name);

// Returns the path of a regular file of the directory. Throws ErrorCode::not_found, or ::format for a device
// or a link that leads outside.
std::filesystem::path file_inside(const std::filesystem::path& directory, const std::string& name);

struct HfTensor : checkpoint::TensorInfo {
  const checkpoint::SafetensorsFile* file = nullptr;
  const checkpoint::SafetensorsEntry* entry = nullptr;
};

class HfDirectory final : public checkpoint::MapSource<HfTensor> {
 public:
  // Maps every weight file and checks it against the index. Throws ErrorCode::not_found, ::format, or
  // ::unsupported for pickles, by name.
  explicit HfDirectory(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  // The weight files in the order of their names.
  std::vector<std::filesystem::path> weight_files() const;
  bool has_file(std::string_view name) const;
  // Reads a file of at most 1 GiB, enough for any tokenizer.
  std::string read_text(std::string_view name) const;
  // The files of asset_files() that exist in the directory.
  std::vector<std::string> assets() const;

  std::string description() const override { return "`" + directory_.string() + "`"; }
  // The bytes of a tensor in the mapped file.
  std::span<const std::byte> bytes(std::string_view name) const;
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

 private:
  void add(const checkpoint::SafetensorsFile& file);

  std::filesystem::path directory_;
  std::vector<std::unique_ptr<checkpoint::SafetensorsFile>> files_;
};

// The index of sharded weights: tensor → file. Names of files are plain and end in .safetensors.
std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file);

}  // namespace capstan::formats
