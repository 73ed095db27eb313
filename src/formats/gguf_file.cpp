#include "formats/gguf_file.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "base/checked.hpp"
#include "base/cursor.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::formats {

using Kind = GgufValue::Kind;

namespace {

enum Wire : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };
constexpr uint64_t kMaxText = 16 << 20, kMaxName = 128, kMaxKey = 65535;

// The first multiple of the alignment at or above `offset`, which is at most the size of a file.
uint64_t aligned(uint64_t offset, int64_t alignment = kGgufAlignment) {
  return static_cast<uint64_t>(round_up(static_cast<int64_t>(offset), alignment));
}

class HeaderReader {
 public:
  HeaderReader(std::span<const std::byte> bytes, const std::string& file)
      : cursor_(bytes, file), file_(file), total_(bytes.size()) {}

  GgufHeader read() {
    if (cursor_.take_text(4, "the magic") != "GGUF") refuse(0, "the file does not begin with `GGUF`");
    if (const auto version = cursor_.read<uint32_t>("the version"); version != 3)
      fail(ErrorCode::unsupported, file_ + ": GGUF version " + std::to_string(version) + "; only 3 is read");
    const auto tensors = cursor_.read<uint64_t>("the number of tensors");
    const auto keys = cursor_.read<uint64_t>("the number of keys");
    // A key takes at least eight bytes of length, four of type and a value.
    at_most(keys, 13, "keys");
    at_most(tensors, 24, "tensors");
    for (uint64_t i = 0; i < keys; ++i) {
      std::string key = text(kMaxKey, "a key");
      const auto type = cursor_.read<uint32_t>("a value's type");
      GgufValue read = value(type, key);
      if (!header_.metadata.emplace(key, std::move(read)).second)
        refuse("the key " + in_quotes(key) + " twice");
    }
    if (const auto split = header_.metadata.find("split.count");
        split != header_.metadata.end() && split->second.integer > 1)
      fail(ErrorCode::unsupported,
           file_ + ": it is one of " + std::to_string(split->second.integer) + " files of a split model",
           "join them first: llama-gguf-split --merge");
    std::set<std::string> names;
    for (uint64_t i = 0; i < tensors; ++i) {
      header_.tensors.push_back(tensor());
      if (!names.insert(header_.tensors.back().name).second)
        refuse("the tensor " + in_quotes(header_.tensors.back().name) + " twice");
    }
    locate_data();
    return std::move(header_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { refuse(cursor_.offset(), what); }
  template <class Offset>
  [[noreturn]] void refuse(Offset offset, const std::string& what) const {
    fail(ErrorCode::format, file_ + ": offset " + std::to_string(offset) + ": " + what);
  }
  void at_most(uint64_t count, uint64_t least_bytes, const char* what) const {
    if (count > cursor_.remaining() / least_bytes)
      refuse(std::to_string(count) + " " + what + " do not fit the " + std::to_string(cursor_.remaining()) +
             " bytes that are left");
  }

  std::string text(uint64_t longest, const char* what) {
    const auto length = cursor_.read<uint64_t>(what);
    if (length > longest) refuse(std::string(what) + " of " + std::to_string(length) + " bytes");
    return std::string(cursor_.take_text(length, what));
  }

  template <class T>
  int64_t integer_of() {
    const T value = cursor_.read<T>("a value");
    if constexpr (std::is_same_v<T, uint64_t>)
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) refuse("a number above 2^63");
    return static_cast<int64_t>(value);
  }

  static uint64_t least_bytes(uint32_t type) {
    constexpr uint64_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};
    return sizes[type];
  }

  GgufValue value(uint32_t type, const std::string& key) {
    GgufValue v;
    switch (type) {
      case kF32:
        v.kind = Kind::real;
        v.real = static_cast<double>(cursor_.read<float>("a value"));
        return v;
      case kF64:
        v.kind = Kind::real;
        v.real = cursor_.read<double>("a value");
        return v;
      case kBool:
        v.kind = Kind::boolean;
        v.integer = integer_of<uint8_t>();
        if (v.integer > 1) refuse("the boolean " + in_quotes(key) + " is " + std::to_string(v.integer));
        return v;
      case kString:
        v.kind = Kind::text;
        v.text = text(kMaxText, "a text");
        return v;
      case kArray:
        return array(key);
      default:
        v.integer = integer(type, key);
        return v;
    }
  }

  int64_t integer(uint32_t type, const std::string& key) {
    switch (type) {
      case kU8:
        return integer_of<uint8_t>();
      case kI8:
        return integer_of<int8_t>();
      case kU16:
        return integer_of<uint16_t>();
      case kI16:
        return integer_of<int16_t>();
      case kU32:
        return integer_of<uint32_t>();
      case kI32:
        return integer_of<int32_t>();
      case kU64:
        return integer_of<uint64_t>();
      case kI64:
        return integer_of<int64_t>();
      case kBool:
        return integer_of<uint8_t>();
      default:
        refuse("the key " + in_quotes(key) + " has the unknown type " + std::to_string(type));
    }
  }

  GgufValue array(const std::string& key) {
    const auto type = cursor_.read<uint32_t>("an array's type");
    const auto count = cursor_.read<uint64_t>("an array's length");
    if (type > kF64 || type == kArray)
      refuse("the array " + in_quotes(key) + " has items of type " + std::to_string(type));
    at_most(count, least_bytes(type), "items of an array");
    GgufValue v;
    if (type == kString) {
      v.kind = Kind::texts;
      v.texts.reserve(count);
      for (uint64_t i = 0; i < count; ++i) v.texts.push_back(text(kMaxText, "a text"));
    } else if (type == kF32 || type == kF64) {
      v.kind = Kind::reals;
      v.reals.reserve(count);
      for (uint64_t i = 0; i < count; ++i)
        v.reals.push_back(type == kF32 ? static_cast<double>(cursor_.read<float>("a value"))
                                       : cursor_.read<double>("a value"));
    } else {
      v.kind = Kind::integers;
      v.integers.reserve(count);
      for (uint64_t i = 0; i < count; ++i) v.integers.push_back(integer(type, key));
    }
    return v;
  }

  GgufTensor tensor() {
    GgufTensor t;
    t.name = text(kMaxName, "a tensor's name");
    const auto rank = cursor_.read<uint32_t>("a tensor's dimensions");
    if (rank < 1 || rank > 4)
      refuse("the tensor " + in_quotes(t.name) + " has " + std::to_string(rank) + " dimensions");
    int64_t elements = 1;
    for (uint32_t d = 0; d < rank; ++d) {
      const auto size = cursor_.read<uint64_t>("a tensor's size");
      const auto product = size <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
                               ? try_mul(elements, static_cast<int64_t>(size))
                               : std::nullopt;
      if (size == 0 || !product)
        refuse("the tensor " + in_quotes(t.name) + " has a size of " + std::to_string(size));
      elements = *product;
      t.shape.push_back(static_cast<int64_t>(size));
    }
    std::reverse(t.shape.begin(), t.shape.end());
    t.type = cursor_.read<uint32_t>("a tensor's type");
    t.offset = cursor_.read<uint64_t>("a tensor's offset");
    const GgmlType* type = find_ggml_type(t.type);
    if (!type) {
      const auto name = ggml_type_name(t.type);
      fail(name.empty() ? ErrorCode::format : ErrorCode::unsupported,
           file_ + ": the tensor " + in_quotes(t.name) + " is of type " +
               (name.empty() ? std::to_string(t.type) : std::string(name)),
           "F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K and Q6_K are read");
    }
    if (t.shape.back() % type->block != 0)
      refuse("the tensor " + in_quotes(t.name) + " of " + std::string(type->name) + " has rows of " +
             std::to_string(t.shape.back()) + " elements, no multiple of " + std::to_string(type->block));
    const auto bytes = try_mul(elements / type->block, type->bytes);
    if (!bytes) refuse("the tensor " + in_quotes(t.name) + " has too many bytes");
    t.bytes = static_cast<uint64_t>(*bytes);
    return t;
  }

  // Tensors are consecutive, each at a multiple of the alignment.
  void locate_data() {
    int64_t alignment = kGgufAlignment;
    if (const auto found = header_.metadata.find("general.alignment"); found != header_.metadata.end()) {
      const int64_t value = found->second.kind == Kind::integer ? found->second.integer : 0;
      if (value < 1 || value > (1 << 20) || !std::has_single_bit(static_cast<uint64_t>(value)))
        refuse("`general.alignment` is not a power of two from 1 to 2^20");
      alignment = value;
    }
    header_.data_begin = aligned(cursor_.offset(), alignment);
    if (header_.tensors.empty()) return;
    if (header_.data_begin > total_) refuse("it ends before its data");
    const uint64_t available = total_ - header_.data_begin;
    std::vector<const GgufTensor*> order;
    for (const GgufTensor& t : header_.tensors) order.push_back(&t);
    std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
    uint64_t expected = 0;
    for (const GgufTensor* t : order) {
      if (t->offset != expected)
        fail(ErrorCode::format, file_ + ": the tensor " + in_quotes(t->name) + " has offset " +
                                    std::to_string(t->offset) + ", and " + std::to_string(expected) +
                                    " is expected");
      if (t->bytes > available || t->offset > available - t->bytes)
        fail(ErrorCode::format,
             file_ + ": the tensor " + in_quotes(t->name) + " ends after the end of the file (truncated?)");
      expected = aligned(t->offset + t->bytes, alignment);
    }
  }

  ByteCursor cursor_;
  const std::string& file_;
  uint64_t total_;
  GgufHeader header_;
};

}  // namespace

GgufHeader parse_gguf(std::span<const std::byte> bytes, const std::string& file) {
  return HeaderReader(bytes, file).read();
}

GgufFile::GgufFile(const std::filesystem::path& path) : map_(path) {
  refuse_placeholder(map_.bytes(), path.string());
  header_ = parse_gguf(map_.bytes(), path.string());
  for (const GgufTensor& tensor : header_.tensors) {
    StoredGguf stored;
    stored.shape = tensor.shape;
    stored.dtype = tensor.type == kGgmlF16 ? DType::f16 : tensor.type == kGgmlBf16 ? DType::bf16 : DType::f32;
    stored.tensor = &tensor;
    stored.type = find_ggml_type(tensor.type);
    tensors_.emplace(tensor.name, stored);
  }
}

void GgufFile::read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) {
  const StoredGguf& stored = entry(name);
  CAPSTAN_ASSERT(fits(wanted, stored.shape) && wanted.sizes.size() <= 3, "a region of " + std::string(name));
  if (!can_convert(stored.dtype, dtype))
    fail(ErrorCode::unsupported, description() + ": the tensor " + in_quotes(name) + " is " +
                                     std::string(stored.type->name) + " and cannot be read as " +
                                     std::string(name_of(dtype)));
  const auto bytes = map_.bytes().subspan(static_cast<size_t>(header_.data_begin + stored.tensor->offset),
                                          static_cast<size_t>(stored.tensor->bytes));
  if (stored.type->block == 1) {
    checkpoint::copy_mapped_region(map_, bytes, wanted, full_region(stored.shape), stored.dtype, wanted,
                                   out.data(), dtype);
    return;
  }
  // Dequantizes, for each row, the blocks that contain the columns.
  const GgmlType& type = *stored.type;
  const size_t rank = wanted.sizes.size(), last = rank - 1;
  const int64_t rows = rank > 1 ? wanted.sizes[last - 1] : 1,
                all_rows = rank > 1 ? stored.shape[last - 1] : 1, matrices = rank > 2 ? wanted.sizes[0] : 1,
                first_row =
                    (rank > 2 ? wanted.offsets[0] * all_rows : 0) + (rank > 1 ? wanted.offsets[last - 1] : 0);
  const int64_t columns = wanted.sizes[last], row_blocks = stored.shape[last] / type.block;
  const int64_t begin = wanted.offsets[last] / type.block,
                end = ceil_div(wanted.offsets[last] + columns, type.block);
  std::vector<float> values(static_cast<size_t>((end - begin) * type.block));
  const Region box{{begin * type.block}, {(end - begin) * type.block}};
  const Region part{{wanted.offsets[last]}, {columns}};
  for (int64_t row = 0; row < matrices * rows; ++row) {
    const int64_t at_row = first_row + row / rows * all_rows + row % rows;
    const int64_t at = (at_row * row_blocks + begin) * type.bytes;
    dequantize(type, bytes.subspan(static_cast<size_t>(at), static_cast<size_t>((end - begin) * type.bytes)),
               values);
    copy_region(part, box, reinterpret_cast<const std::byte*>(values.data()), DType::f32, part,
                out.data() + row * columns * size_of(dtype), dtype);
  }
  const int64_t read_rows = matrices == 0 ? 0 : (matrices - 1) * all_rows + rows;
  map_.release(bytes.subspan(static_cast<size_t>(first_row * row_blocks * type.bytes),
                             static_cast<size_t>(read_rows * row_blocks * type.bytes)));
}

namespace {

class HeaderWriter {
 public:
  template <class T>
  void put(T value) {
    const size_t at = bytes.size();
    bytes.resize(at + sizeof value);
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }
  void put_text(const std::string& text) {
    put<uint64_t>(text.size());
    bytes += text;
  }
  void put_value(const GgufValue& v) {
    switch (v.kind) {
      case Kind::integer:
        put<uint32_t>(kU32);
        return put<uint32_t>(checked_cast<uint32_t>(v.integer));
      case Kind::real:
        put<uint32_t>(kF32);
        return put<float>(static_cast<float>(v.real));
      case Kind::boolean:
        put<uint32_t>(kBool);
        return put<uint8_t>(v.integer != 0);
      case Kind::text:
        put<uint32_t>(kString);
        return put_text(v.text);
      case Kind::integers:
        begin_array(kI32, v.integers.size());
        for (const int64_t item : v.integers) put<int32_t>(checked_cast<int32_t>(item));
        return;
      case Kind::reals:
        begin_array(kF32, v.reals.size());
        for (const double item : v.reals) put<float>(static_cast<float>(item));
        return;
      case Kind::texts:
        begin_array(kString, v.texts.size());
        for (const std::string& item : v.texts) put_text(item);
        return;
    }
  }
  std::string bytes;

 private:
  void begin_array(uint32_t type, size_t count) {
    put<uint32_t>(kArray);
    put<uint32_t>(type);
    put<uint64_t>(count);
  }
};

}  // namespace

std::string gguf_header(const std::vector<std::pair<std::string, GgufValue>>& metadata,
                        std::vector<GgufTensor>& tensors) {
  HeaderWriter writer;
  writer.bytes = "GGUF";
  writer.put<uint32_t>(3);
  writer.put<uint64_t>(tensors.size());
  writer.put<uint64_t>(metadata.size());
  for (const auto& [key, value] : metadata) {
    writer.put_text(key);
    writer.put_value(value);
  }
  uint64_t offset = 0;
  for (GgufTensor& tensor : tensors) {
    const GgmlType* type = find_ggml_type(tensor.type);
    tensor.offset = offset;
    tensor.bytes = static_cast<uint64_t>(tensor.shape.elements() / type->block * type->bytes);
    offset += aligned(tensor.bytes);
    writer.put_text(tensor.name);
    writer.put<uint32_t>(checked_cast<uint32_t>(tensor.shape.size()));
    for (size_t d = tensor.shape.size(); d-- > 0;)
      writer.put<uint64_t>(checked_cast<uint64_t>(tensor.shape[d]));
    writer.put<uint32_t>(tensor.type);
    writer.put<uint64_t>(tensor.offset);
  }
  writer.bytes.resize(aligned(writer.bytes.size()), '\0');
  return std::move(writer.bytes);
}

GgufValue gguf_integer(int64_t value) {
  GgufValue v;
  v.integer = value;
  return v;
}
GgufValue gguf_real(double value) {
  GgufValue v;
  v.kind = Kind::real;
  v.real = value;
  return v;
}
GgufValue gguf_boolean(bool value) {
  GgufValue v;
  v.kind = Kind::boolean;
  v.integer = value;
  return v;
}
GgufValue gguf_text(std::string value) {
  GgufValue v;
  v.kind = Kind::text;
  v.text = std::move(value);
  return v;
}

}  // namespace capstan::formats
