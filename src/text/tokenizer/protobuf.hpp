// Reads the wire format of Protocol Buffers, field by field, with every length checked. SentencePiece's
// models are such.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace capstan::text {

class ProtobufReader {
 public:
  struct Field {
    uint32_t number = 0;
    std::string_view bytes;  // of a text, a blob, a message
    uint64_t integer = 0;    // of a varint, or the bits of a fixed number
    bool is_bytes = false;
    bool is_fixed32 = false;
  };

  // `place` begins every message; `start` is where the bytes lie in the file.
  ProtobufReader(std::string_view bytes, const std::string& place, uint64_t start = 0)
      : bytes_(bytes), place_(place), start_(start) {}

  // false at the end; ErrorCode::format where the bytes are no such message.
  bool next(Field& field);
  // Where a field's bytes lie in the file, for a reader inside.
  uint64_t offset_of(const Field& field) const {
    return start_ + static_cast<uint64_t>(field.bytes.data() - bytes_.data());
  }

  // The values, ErrorCode::format when the field is of another kind.
  std::string_view bytes(const Field& field) const;
  int64_t integer(const Field& field) const;
  bool boolean(const Field& field) const { return integer(field) != 0; }
  float number(const Field& field) const;

 private:
  uint64_t varint();
  [[noreturn]] void fail_here(const std::string& what) const;

  std::string_view bytes_;
  const std::string& place_;
  uint64_t start_;
  size_t at_ = 0;
};

}  // namespace capstan::text
