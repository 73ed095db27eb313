// One converted value, without its C++ type: what show, hash, diff and interpolation work on. A field's Type converts
// between it and the struct member.
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
  int64_t integer = 0;            // integers, bytes
  double real = 0;                // reals, durations (seconds)
  std::string text;               // text, enum names, paths as written, secret references
  std::string resolved;           // paths only: the absolute form
  std::vector<Value> items;       // list and map
  std::vector<std::string> keys;  // map: one for each item, in the order written

  static Value of(bool value);
  static Value of(int64_t value);
  static Value of(double value);
  static Value of(std::string value);
  static Value list();
  static Value map();
  void add(std::string key, Value value);

  bool is_null() const { return kind == Kind::null; }
  double number() const { return kind == Kind::integer ? static_cast<double>(integer) : real; }
  bool operator==(const Value& other) const;  // NaN equals NaN; paths by their absolute form
  bool operator!=(const Value& other) const { return !(*this == other); }
};

}  // namespace capstan::config
