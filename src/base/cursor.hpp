// A bounds-checked little-endian reader over untrusted bytes. Every out-of-range read is an
// ErrorCode::format error that names the file and the offset.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/error.hpp"

namespace capstan {

class ByteCursor {
 public:
  ByteCursor(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), file_(std::move(file)) {}

  size_t offset() const { return offset_; }
  size_t remaining() const { return bytes_.size() - offset_; }

  template <class T>
  T read(const char* what) {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> take(uint64_t count, const char* what) {
    if (count > remaining())
      fail(ErrorCode::format, file_ + ": offset " + std::to_string(offset_) + ": " + what + " needs " +
                                  std::to_string(count) + " bytes, but only " + std::to_string(remaining()) +
                                  " are left");
    auto result = bytes_.subspan(offset_, count);
    offset_ += count;
    return result;
  }
  std::string_view take_text(uint64_t count, const char* what) {
    auto bytes = take(count, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  std::string file_;
  size_t offset_ = 0;
};

}  // namespace capstan
