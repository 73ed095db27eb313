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
  int64_t integer = 0;  // integers, bytes
  // Reals, durations (seconds)
  double real = 0;
  // Text, enum names, paths as written, secret references.
  std::string text;
  // Paths only: the absolute form.
  std::string resolved;
  // List and map.
  std::vector<Value> items;
  // map: one for each item, in the order written.
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
  // NaN equals NaN; paths by their absolute form.
  bool operator==(const Value& other) const;
  bool operator!=(const Value& other) const { return !(*this == other); }
};

}  // namespace capstan::config
