// One converted value, without its C++ type: what show, hash, diff and interpolation work on. A field's Type
// converts between it and the struct member.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::config {

struct Value {
  enum class Kind : uint8_t { null, boolean, integer, real, text, list, map };

  Kind kind = Kind::null;
  bool boolean = false;
  // Value of integers and of bytes.
  int64_t integer = 0;
  // Value of reals, and of durations in seconds.
  double real = 0;
  // Texts, enum names, paths as written, and references to secrets.
  std::string text;
  // Absolute form of a path.
  std::string resolved;
  // Items of a list or values of a map.
  std::vector<Value> items;
  // Keys of a map, one for each item, in the order written.
  std::vector<std::string> keys;

  static Value of(bool value);
  static Value of(int64_t value);
  static Value of(double value);
  static Value of(std::string value);
  static Value list();
  static Value map();
  void add(std::string key, Value value);

  bool is_null() const { return kind == Kind::null; }
  double number() const { return kind == Kind::integer ? static_cast<double>(integer) : real; }
  // NaN equals NaN. Paths are compared by their absolute form.
  bool operator==(const Value& other) const;
  bool operator!=(const Value& other) const { return !(*this == other); }
};

}  // namespace capstan::config
