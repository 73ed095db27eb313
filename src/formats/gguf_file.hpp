// The GGUF format, version 3: metadata and tensors. Every size is checked against the file's size before use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "checkpoint/tensor_source.hpp"
#include "formats/gguf_quants.hpp"

namespace capstan::formats {

// A value of the metadata; arrays hold one of the three lists.
struct GgufValue {
  enum class Kind : uint8_t { integer, real, boolean, text, integers, reals, texts };
  Kind kind = Kind::integer;
  // Holds integers and booleans. Unsigned integers of 2^63 and above are refused.
  int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<int64_t> integers;
  std::vector<double> reals;
  std::vector<std::string> texts;
};
using GgufMetadata = std::map<std::string, GgufValue, std::less<>>;

struct GgufTensor {
  std::string name;
  // Outermost dimension first; the file stores the reverse order.
  Shape shape;
  uint32_t type = 0;
  // Byte offset from the start of the data.
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct GgufHeader {
  GgufMetadata metadata;
  // The tensors in the order of the file.
  std::vector<GgufTensor> tensors;
  uint64_t data_begin = 0;
};
// Parses the header of a file that messages call `file`. Throws ErrorCode::format, or ::unsupported for
// unsupported versions, types and split files.
GgufHeader parse_gguf(std::span<const std::byte> bytes, const std::string& file);

struct StoredGguf : checkpoint::TensorInfo {
  const GgufTensor* tensor = nullptr;
  const GgmlType* type = nullptr;
};

// A mapped GGUF file. Quantized tensors are read as fp32.
class GgufFile final : public checkpoint::MapSource<StoredGguf> {
 public:
  explicit GgufFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return map_.path(); }
  const GgufMetadata& metadata() const { return header_.metadata; }

  std::string description() const override { return "`" + map_.path().string() + "`"; }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

 private:
  MappedFile map_;
  GgufHeader header_;
};

// ---- writing ----

// The bytes of a file up to its data: offsets are those of the tensors in their order, each at a multiple of
// 32.
std::string gguf_header(const std::vector<std::pair<std::string, GgufValue>>& metadata,
                        std::vector<GgufTensor>& tensors);
inline constexpr int64_t kGgufAlignment = 32;

// A value that is written as u32.
GgufValue gguf_integer(int64_t value);
// A value that is written as f32.
GgufValue gguf_real(double value);
GgufValue gguf_boolean(bool value);
GgufValue gguf_text(std::string value);

}  // namespace capstan::formats
