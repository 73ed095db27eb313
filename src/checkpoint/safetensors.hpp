// The safetensors format: u64 header length, JSON header, data. The reader refuses every violation of the
// format and names file, offset or tensor; the writer gives the same bytes as the reference implementation.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file.hpp"
#include "checkpoint/file_system.hpp"
#include "checkpoint/hash.hpp"
#include "tensor/dtype.hpp"
#include "tensor/region.hpp"

namespace capstan::checkpoint {

struct SafetensorsEntry {
  std::string name;
  // The type's name in the file: "F32", "BF16", "F8_E4M3" …
  std::string dtype_name;
  // nullopt: a type that Capstan does not support.
  std::optional<DType> dtype;
  Shape shape;
  // Byte offsets from the start of the data.
  int64_t begin = 0, end = 0;
};

struct SafetensorsHeader {
  // Tensors in ascending order of their offsets.
  std::vector<SafetensorsEntry> entries;
  // The entries of `__metadata__`.
  std::map<std::string, std::string> metadata;
  // File offset of the data: 8 + header length.
  int64_t data_begin = 0;
};

// Checks everything: header length within the file and 100 MB, UTF-8, JSON (depth, no duplicates, no floats,
// at most six dimensions), known element types, sizes without overflow, data contiguous from 0 to the end of
// the file. `file` names it in errors (ErrorCode::format). Allocates no more than a small multiple of the
// header's length.
SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

// A mapped safetensors file. bytes() may be unaligned, because older writers do not align the data.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return map_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // Returns nullptr if there is no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;
  // Throws ErrorCode::not_found, with similar names, if there is no such tensor.
  const SafetensorsEntry& at(std::string_view name) const;
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  // copy_region() from the entry, which holds the region `source_region`, in bounded chunks whose pages do
  // not stay resident. The entry has a DType.
  void copy_region(const SafetensorsEntry& entry, const Region& region, const Region& source_region,
                   const Region& target_region, std::byte* target, DType target_type) const;

 private:
  MappedFile map_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

// Passes a tensor's bytes to the sink when they are to be written, in order and in chunks of any size. A
// chunk need only stay valid during its call, so that a small buffer suffices for a tensor of any size.
using ByteSink = std::function<void(std::span<const std::byte>)>;
using ByteSource = std::function<void(const ByteSink& sink)>;
// A source of bytes that stay valid until the file is written.
ByteSource source_of(std::span<const std::byte> bytes);
// A source that reads the tensor `name` of `source` as `dtype`, in chunks of full rows.
class TensorSource;
ByteSource source_of(TensorSource& source, std::string name, DType dtype);
// The recommended chunk size of a source, in bytes.
inline constexpr int64_t kChunkBytes = int64_t{8} << 20;

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  ByteSource source;
};

// Writes a file in the order of the reference (element type descending, then name) with sorted metadata;
// hashes and fsyncs it. Throws ErrorCode::internal when a source's byte count differs from its shape, or a
// name repeats.
FileHash write_safetensors(FileSystem& files, const std::filesystem::path& path,
                           std::span<const SafetensorsTensor> tensors,
                           const std::map<std::string, std::string>& metadata);

}  // namespace capstan::checkpoint
