// The safetensors format: u64 header length, JSON header, data. The reader refuses whatever the format
// forbids, with file, offset or tensor; the writer gives the bytes that the reference implementation gives.
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
  std::string dtype_name;      // as in the file: "F32", "BF16", "F8_E4M3" …
  std::optional<DType> dtype;  // nullopt: a type of the format that Capstan does not compute with
  Shape shape;
  int64_t begin = 0, end = 0;  // bytes, relative to the begin of the data
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // by offset
  std::map<std::string, std::string> metadata;  // `__metadata__`
  int64_t data_begin = 0;                       // 8 + header length
};

// Checks everything: header length within the file and 100 MB, UTF-8, JSON of the right form (depth, no
// duplicates, no floats), known element types, sizes without overflow, data contiguous from 0 to the end of
// the file. `file` names it in errors (ErrorCode::format). Allocates no more than a small multiple of the
// header's length.
SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

// A mapped safetensors file. bytes() may be unaligned: the format aligns only what our writer and recent
// others write.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return map_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(std::string_view name) const;  // nullptr: not there
  const SafetensorsEntry& at(std::string_view name) const;    // throws ErrorCode::not_found with near names
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  // copy_region() from the entry, whose cells are those of `box`; in bounded pieces whose pages do not stay resident.
  void copy_region(const SafetensorsEntry& entry, const Region& part, const Region& box,
                   const Region& target_box, std::byte* target, DType target_type) const;

 private:
  MappedFile map_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

// Hands a tensor's bytes to the sink, in order and in pieces of any size, when it is their turn to be written.
// Each piece need only stay valid during its call, so that a small buffer is enough for a tensor of any size.
using ByteSink = std::function<void(std::span<const std::byte>)>;
using ByteSource = std::function<void(const ByteSink& sink)>;
// Of bytes that stay valid until the file is written.
ByteSource source_of(std::span<const std::byte> bytes);
// Of `tensor` of `source` as `dtype`, in pieces of whole rows.
class TensorSource;
ByteSource source_of(TensorSource& source, std::string name, DType dtype);
// How much a source should hand over at once.
inline constexpr int64_t kChunkBytes = int64_t{8} << 20;

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  ByteSource source;
};

// Writes a file in the order of the reference (element type descending, then name) with sorted metadata;
// hashes on the way; fsyncs. Throws ErrorCode::internal when a source gives another number of bytes than its
// shape says, or a name repeats.
FileHash write_safetensors(FileSystem& files, const std::filesystem::path& path,
                           std::span<const SafetensorsTensor> tensors,
                           const std::map<std::string, std::string>& metadata);

}  // namespace capstan::checkpoint
