#include "checkpoint/safetensors.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <numeric>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/checked.hpp"
#include "base/cursor.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "checkpoint/tensor_source.hpp"

namespace capstan::checkpoint {

namespace {

constexpr int64_t kMaxHeader = 100'000'000;
constexpr size_t kMaxName = 4096;

// Element types in the ascending order of the reference implementation, which determines the order of tensors
// in the file.
struct ElementType {
  std::string_view name;
  int64_t bits;
};
constexpr std::array<ElementType, 22> kTypes{
    {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
     {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
     {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
     {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}}};

std::string_view safetensors_name(DType type) {
  switch (type) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f64:
      return "F64";
    case DType::u8:
      return "U8";
    case DType::i8:
      return "I8";
    case DType::u16:
      return "U16";
    case DType::i16:
      return "I16";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::f8e8m0:
    case DType::f4e2m1x2:
      fail(ErrorCode::internal, "safetensors has no name for type " + std::string(name_of(type)));
  }
  return "";
}

int64_t order_of(std::string_view type_name) {
  for (size_t i = 0; i < kTypes.size(); ++i)
    if (kTypes[i].name == type_name) return static_cast<int64_t>(i);
  return -1;
}

// Returns why a name is refused, or an empty text. Capstan never uses names as paths, but refuses names that
// could attack programs that do.
std::string name_problem(std::string_view name) {
  if (name.size() > kMaxName) return "is longer than " + std::to_string(kMaxName) + " bytes";
  for (const char c : name)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return "holds a control character";
  for (const auto part : split(name, '/'))
    if (part == "..") return "holds a path component `..`";
  return {};
}

// The input of the parser; counts bytes for the offsets in errors.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  CountingIterator(const char* at, const char** seen) : at_(at), seen_(seen) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** seen_;
};

// Accepts the parser's events only in the order that the format allows.
class HeaderReader {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  HeaderReader(const std::string& file, const char* begin, const char* const* seen)
      : file_(file), begin_(begin), seen_(seen) {}

  SafetensorsHeader header;

  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) {
    return unexpected("the negative number " + std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) {
    return unexpected("the number " + text.substr(0, 40) + " (a size is an integer below 2^63)");
  }
  bool binary(binary_t&) { return unexpected("binary data"); }
  bool number_unsigned(number_unsigned_t value) {
    if (value > static_cast<uint64_t>(INT64_MAX)) return unexpected("the number " + std::to_string(value));
    const auto number = static_cast<int64_t>(value);
    if (state_ == State::shape_items) {
      if (entry_.shape.rank() == Shape::kMaxRank)
        refuse("more than " + std::to_string(Shape::kMaxRank) + " dimensions");
      entry_.shape.push_back(number);
      return true;
    }
    if (state_ == State::offset_items) {
      if (offsets_ == 2) refuse("`data_offsets` has more than two numbers");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = number;
      return true;
    }
    return unexpected("the number " + std::to_string(value));
  }
  bool string(string_t& text) {
    if (state_ == State::metadata_value) {
      header.metadata[key_] = std::move(text);
      state_ = State::metadata;
      return true;
    }
    if (state_ != State::dtype_value) return unexpected("a string");
    if (order_of(text) < 0) refuse("unknown element type " + in_quotes(std::string_view(text).substr(0, 40)));
    entry_.dtype_name = std::move(text);
    state_ = State::entry;
    return true;
  }
  bool start_object(std::size_t) {
    if (state_ == State::start)
      state_ = State::top;
    else if (state_ == State::top_value && key_ == "__metadata__")
      state_ = State::metadata;
    else if (state_ == State::top_value) {
      state_ = State::entry;
      entry_ = {};
      entry_.name = key_;
      has_dtype_ = has_shape_ = has_offsets_ = false;
      offsets_ = 0;
    } else
      return unexpected("an object");
    return true;
  }
  bool key(string_t& text) {
    if (state_ == State::top) {
      if (const std::string problem = name_problem(text); !problem.empty())
        refuse("the tensor name " + in_quotes(std::string_view(text).substr(0, 80)) + " " + problem);
      if (!names_.insert(text).second) refuse("duplicate name " + in_quotes(text));
      key_ = text;
      state_ = State::top_value;
    } else if (state_ == State::metadata) {
      if (header.metadata.count(text)) refuse("duplicate key " + in_quotes(text) + " in `__metadata__`");
      key_ = text;
      state_ = State::metadata_value;
    } else {
      bool* seen = text == "dtype"          ? &has_dtype_
                   : text == "shape"        ? &has_shape_
                   : text == "data_offsets" ? &has_offsets_
                                            : nullptr;
      if (!seen) refuse("unknown field " + in_quotes(std::string_view(text).substr(0, 80)));
      if (std::exchange(*seen, true)) refuse("duplicate field " + in_quotes(text));
      state_ = text == "dtype"   ? State::dtype_value
               : text == "shape" ? State::shape_value
                                 : State::offset_value;
    }
    return true;
  }
  bool end_object() {
    if (state_ == State::entry) {
      if (!has_dtype_) refuse("`dtype` is missing");
      if (!has_shape_) refuse("`shape` is missing");
      if (!has_offsets_) refuse("`data_offsets` is missing");
      header.entries.push_back(std::move(entry_));
      state_ = State::top;
    } else if (state_ == State::metadata) {
      state_ = State::top;
    } else {
      state_ = State::end;
    }
    return true;
  }
  bool start_array(std::size_t) {
    if (state_ == State::shape_value)
      state_ = State::shape_items;
    else if (state_ == State::offset_value)
      state_ = State::offset_items;
    else
      return unexpected("an array");
    return true;
  }
  bool end_array() {
    if (state_ == State::offset_items && offsets_ != 2) refuse("`data_offsets` has fewer than two numbers");
    state_ = State::entry;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) {
    // refuse() gives the offset in the file.
    refuse("bad JSON: " + json_reason(error).substr(0, 200));
  }

 private:
  enum class State : uint8_t {
    start,
    top,
    top_value,
    metadata,
    metadata_value,
    entry,
    dtype_value,
    shape_value,
    shape_items,
    offset_value,
    offset_items,
    end
  };

  bool unexpected(const std::string& what) {
    static constexpr std::array<std::string_view, 12> expected{"an object",
                                                               "a name",
                                                               "an object with dtype, shape and data_offsets",
                                                               "a key",
                                                               "a string (metadata are strings)",
                                                               "a key",
                                                               "a string for `dtype`",
                                                               "an array for `shape`",
                                                               "a size",
                                                               "an array for `data_offsets`",
                                                               "an offset",
                                                               "nothing more"};
    refuse("found " + what + " where " + std::string(expected[static_cast<size_t>(state_)]) + " belongs");
  }
  [[noreturn]] void refuse(const std::string& text) const {
    const bool in_tensor = state_ >= State::entry && state_ != State::end;
    fail(ErrorCode::format, file_ + ": offset " + std::to_string(8 + (*seen_ - begin_)) + ": " +
                                (in_tensor ? "tensor " + in_quotes(entry_.name) + ": " : "") + text);
  }

  const std::string& file_;
  const char* begin_;
  const char* const* seen_;
  State state_ = State::start;
  std::string key_;
  std::unordered_set<std::string> names_;
  SafetensorsEntry entry_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int offsets_ = 0;
};

// Checks the entry's size in bytes against its offsets.
void check_entry(const SafetensorsEntry& e, const std::string& where) {
  int64_t elements = 1;
  for (const int64_t size : e.shape) {
    const auto product = try_mul(elements, size);
    if (!product) fail(ErrorCode::format, where + "shape " + e.shape.text() + " has more than 2^63 elements");
    elements = *product;
  }
  const auto bits = try_mul(elements, kTypes[static_cast<size_t>(order_of(e.dtype_name))].bits);
  if (!bits) fail(ErrorCode::format, where + "shape " + e.shape.text() + " overflows the size in bits");
  if (*bits % 8 != 0)
    fail(ErrorCode::format,
         where + "shape " + e.shape.text() + " of " + e.dtype_name + " is not a multiple of 8 bits");
  if (e.end < e.begin)
    fail(ErrorCode::format, where + "data_offsets [" + std::to_string(e.begin) + "," + std::to_string(e.end) +
                                "] end before they begin");
  if (e.end - e.begin != *bits / 8)
    fail(ErrorCode::format, where + "shape " + e.shape.text() + " of " + e.dtype_name + " takes " +
                                std::to_string(*bits / 8) + " bytes, but data_offsets [" +
                                std::to_string(e.begin) + "," + std::to_string(e.end) + "] hold " +
                                std::to_string(e.end - e.begin));
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file) {
  ByteCursor cursor(bytes, file);
  const auto length = cursor.read<uint64_t>("the header length");
  if (length > static_cast<uint64_t>(kMaxHeader))
    fail(ErrorCode::format,
         file + ": offset 0: a header of " + std::to_string(length) + " bytes; the format allows 100000000");
  // Copies the header, because a mapped file may change between check and use.
  const std::string text(cursor.take_text(length, "the header"));
  if (text.empty() || text[0] != '{')
    fail(ErrorCode::format, file + ": offset 8: the header does not begin with `{`");
  if (const auto bad = first_invalid_utf8(text))
    fail(ErrorCode::format,
         file + ": offset " + std::to_string(8 + *bad) + ": the header is not valid UTF-8");
  const size_t last = text.find_last_not_of(' ');
  if (text[last] != '}')
    fail(ErrorCode::format,
         file + ": offset " + std::to_string(8 + last) + ": the header does not end with `}` and spaces");

  const char* begin = text.data();
  const char* seen = begin;
  HeaderReader reader(file, begin, &seen);
  Json::sax_parse(CountingIterator(begin, &seen), CountingIterator(begin + last + 1, &seen), &reader);
  SafetensorsHeader header = std::move(reader.header);
  header.data_begin = static_cast<int64_t>(8 + length);

  auto& entries = header.entries;
  for (auto& e : entries) {
    check_entry(e, file + ": tensor " + in_quotes(e.name) + ": ");
    // FP8 weights of DeepSeek: codes without scales, which formats/fp8_weights.cpp applies.
    // dtype_from_name() has no FP8 names.
    e.dtype = e.dtype_name == "F8_E4M3" ? DType::f8e4m3 : dtype_from_name(e.dtype_name);
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t expected = 0;
  for (const auto& e : entries) {
    if (e.begin != expected)
      fail(ErrorCode::format, file + ": tensor " + in_quotes(e.name) + ": its data begins at " +
                                  std::to_string(e.begin) +
                                  (e.begin < expected ? ", inside of the tensor before it, which ends at "
                                                      : ", which leaves a hole after ") +
                                  std::to_string(expected));
    expected = e.end;
  }
  const auto data = static_cast<int64_t>(cursor.remaining());
  if (expected != data)
    fail(ErrorCode::format, file + ": the tensors take " + std::to_string(expected) +
                                " bytes of data, the file holds " + std::to_string(data) + " from offset " +
                                std::to_string(header.data_begin) + (expected > data ? " (truncated?)" : ""));
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : map_(path) {
  refuse_placeholder(map_.bytes(), path.string());
  header_ = parse_safetensors(map_.bytes(), path.string());
  for (size_t i = 0; i < header_.entries.size(); ++i) by_name_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.entries[found->second];
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  if (const auto* entry = find(name)) return *entry;
  std::vector<std::string> names;
  for (const auto& e : header_.entries) names.push_back(e.name);
  const auto near = near_matches(name, names);
  fail(ErrorCode::not_found, path().string() + ": no tensor " + in_quotes(name),
       near.empty() ? "" : "near names: " + join(near, ", "));
}

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return map_.bytes().subspan(static_cast<size_t>(header_.data_begin + entry.begin),
                              static_cast<size_t>(entry.end - entry.begin));
}

void SafetensorsFile::copy_region(const SafetensorsEntry& entry, const Region& region,
                                  const Region& source_region, const Region& target_region, std::byte* target,
                                  DType target_type) const {
  copy_mapped_region(map_, bytes(entry), region, source_region, entry.dtype.value(), target_region, target,
                     target_type);
}

ByteSource source_of(std::span<const std::byte> bytes) {
  return [bytes](const ByteSink& sink) { sink(bytes); };
}

ByteSource source_of(TensorSource& source, std::string name, DType dtype) {
  return [&source, name = std::move(name), dtype](const ByteSink& sink) {
    std::vector<std::byte> buffer;
    for (const Region& rows : row_slabs(full_region(source.at(name).shape), dtype, kChunkBytes)) {
      buffer.resize(static_cast<size_t>(rows.sizes.elements() * size_of(dtype)));
      source.read(name, dtype, rows, buffer);
      sink(buffer);
    }
  };
}

FileHash write_safetensors(FileSystem& files, const std::filesystem::path& path,
                           std::span<const SafetensorsTensor> tensors,
                           const std::map<std::string, std::string>& metadata) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const int64_t type_a = order_of(safetensors_name(tensors[a].dtype)),
                  type_b = order_of(safetensors_name(tensors[b].dtype));
    return type_a != type_b ? type_a > type_b : tensors[a].name < tensors[b].name;
  });

  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (bool first = true; const auto& [key, value] : metadata) {
      header += (std::exchange(first, false) ? "" : ",") + in_quotes(key) + ":" + in_quotes(value);
    }
    header += "}";
  }
  std::unordered_set<std::string_view> names;
  std::vector<int64_t> sizes;
  int64_t offset = 0;
  for (const size_t i : order) {
    const auto& t = tensors[i];
    const std::string problem = t.name == "__metadata__" ? "is reserved" : name_problem(t.name);
    CAPSTAN_ASSERT(problem.empty(), "tensor name " + in_quotes(t.name) + " " + problem);
    CAPSTAN_ASSERT(names.insert(t.name).second, "tensor name " + in_quotes(t.name) + " twice in one file");
    sizes.push_back(checked_mul(t.shape.elements(), size_of(t.dtype)));
    const int64_t end = checked_add(offset, sizes.back());
    header += (header.size() > 1 ? "," : "") + in_quotes(t.name) + ":{\"dtype\":\"" +
              std::string(safetensors_name(t.dtype)) + "\",\"shape\":" + t.shape.text() +
              ",\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(end) + "]}";
    offset = end;
  }
  header += "}";
  header.resize(static_cast<size_t>(round_up(static_cast<int64_t>(header.size()), 8)), ' ');
  if (static_cast<int64_t>(header.size()) > kMaxHeader)
    fail(ErrorCode::unsupported, "`" + path.string() + "`: the safetensors header would have " +
                                     std::to_string(header.size()) + " bytes; the format allows 100000000");

  Hasher hasher;
  const auto file = files.create(path);
  const auto put = [&](std::span<const std::byte> bytes) {
    // Hashes and writes in blocks, so that hashed data is still in the cache when it is written.
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min(bytes.size(), size_t{1} << 20));
      hasher.update(part);
      file->write(part);
      bytes = bytes.subspan(part.size());
    }
  };
  std::array<std::byte, 8> length;
  const uint64_t header_size = header.size();
  std::memcpy(length.data(), &header_size, 8);
  put(length);
  put(std::as_bytes(std::span(header.data(), header.size())));
  for (size_t k = 0; k < order.size(); ++k) {
    const auto& t = tensors[order[k]];
    int64_t given = 0;
    t.source([&](std::span<const std::byte> bytes) {
      given += static_cast<int64_t>(bytes.size());
      put(bytes);
    });
    CAPSTAN_ASSERT(given == sizes[k], "tensor " + in_quotes(t.name) + " gave " + std::to_string(given) +
                                          " bytes instead of " + std::to_string(sizes[k]));
  }
  file->finish();
  return hasher.finish();
}

}  // namespace capstan::checkpoint
