// Reads the wire format of Protocol Buffers, which SentencePiece models use, field by field, and checks every
// length.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace capstan::text {

class ProtobufReader {
 public:
  struct Field {
    uint32_t number = 0;
    // Value of a text, blob or message.
    std::string_view bytes;
    // Value of a varint, or the bits of a fixed-width number.
    uint64_t integer = 0;
    bool is_bytes = false;
    bool is_fixed32 = false;
  };

  // `location` begins every message; `start` is the offset of the bytes in the file.
  ProtobufReader(std::string_view bytes, const std::string& location, uint64_t start = 0)
      : bytes_(bytes), location_(location), start_(start) {}

  // Reads the next field; returns false at the end. Throws ErrorCode::format if the bytes are malformed.
  bool next(Field& field);
  // The offset of a field's bytes in the file, for the reader of a nested message.
  uint64_t offset_of(const Field& field) const {
    return start_ + static_cast<uint64_t>(field.bytes.data() - bytes_.data());
  }

  // The value of a field; throws ErrorCode::format if the field has another kind.
  std::string_view bytes(const Field& field) const;
  int64_t integer(const Field& field) const;
  bool boolean(const Field& field) const { return integer(field) != 0; }
  float number(const Field& field) const;

 private:
  uint64_t varint();
  [[noreturn]] void fail_here(const std::string& what) const;

  std::string_view bytes_;
  const std::string& location_;
  uint64_t start_;
  size_t at_ = 0;
};

}  // namespace capstan::text
