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
#include "checkpoint/rectangle.hpp"
#include "tensor/dtype.hpp"

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

 private:
  MappedFile map_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

// Gives a tensor's bytes when it is their turn to be written; they stay valid until the next call of any
// source of the file. What lives on a device can so be staged tensor by tensor.
using ByteSource = std::function<std::span<const std::byte>()>;

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
