#include "text/tokenizer/protobuf.hpp"

#include <bit>

#include "base/error.hpp"

namespace capstan::text {

void ProtobufReader::fail_here(const std::string& what) const {
  fail(ErrorCode::format, location_ + ": byte " + std::to_string(start_ + at_) + ": " + what);
}

uint64_t ProtobufReader::varint() {
  uint64_t result = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    if (at_ >= bytes_.size()) fail_here("the file ends inside a number");
    const auto byte = static_cast<unsigned char>(bytes_[at_++]);
    if (shift == 63 && byte > 1) fail_here("a number has more than 64 bits");
    result |= uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return result;
  }
  fail_here("a number has more than 64 bits");
}

bool ProtobufReader::next(Field& field) {
  if (at_ == bytes_.size()) return false;
  const uint64_t key = varint();
  field = {};
  if (key >> 3 == 0 || key >> 3 > 0x1FFFFFFF) fail_here("a field has no valid number");
  field.number = static_cast<uint32_t>(key >> 3);
  const auto take = [&](uint64_t count) {
    if (count > bytes_.size() - at_)
      fail_here("field " + std::to_string(field.number) + " asks for " + std::to_string(count) +
                " bytes, there are " + std::to_string(bytes_.size() - at_));
    const std::string_view result = bytes_.substr(at_, count);
    at_ += count;
    return result;
  };
  const auto fixed = [&](size_t count) {
    const std::string_view raw = take(count);
    for (size_t i = count; i-- > 0;) field.integer = field.integer << 8 | static_cast<unsigned char>(raw[i]);
  };
  switch (key & 7) {
    case 0:
      field.integer = varint();
      break;
    case 1:
      fixed(8);
      break;
    case 2:
      field.is_bytes = true;
      field.bytes = take(varint());
      break;
    case 5:
      field.is_fixed32 = true;
      fixed(4);
      break;
    default:
      fail_here("field " + std::to_string(field.number) + " is of an unknown kind");
  }
  return true;
}

std::string_view ProtobufReader::bytes(const Field& field) const {
  if (!field.is_bytes) fail_here("field " + std::to_string(field.number) + " should hold bytes");
  return field.bytes;
}

int64_t ProtobufReader::integer(const Field& field) const {
  if (field.is_bytes || field.is_fixed32)
    fail_here("field " + std::to_string(field.number) + " should hold an integer");
  return static_cast<int64_t>(field.integer);
}

float ProtobufReader::number(const Field& field) const {
  if (!field.is_fixed32) fail_here("field " + std::to_string(field.number) + " should hold a number");
  return std::bit_cast<float>(static_cast<uint32_t>(field.integer));
}

}  // namespace capstan::text
