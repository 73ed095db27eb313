#include "config/core/value.hpp"

#include <cmath>
#include <utility>

namespace capstan::config {

Value Value::of(bool value) {
  Value result;
  result.kind = Kind::boolean;
  result.boolean = value;
  return result;
}
Value Value::of(int64_t value) {
  Value result;
  result.kind = Kind::integer;
  result.integer = value;
  return result;
}
Value Value::of(double value) {
  Value result;
  result.kind = Kind::real;
  result.real = value;
  return result;
}
Value Value::of(std::string value) {
  Value result;
  result.kind = Kind::text;
  result.text = std::move(value);
  return result;
}
Value Value::list() {
  Value result;
  result.kind = Kind::list;
  return result;
}
Value Value::map() {
  Value result;
  result.kind = Kind::map;
  return result;
}
void Value::add(std::string key, Value value) {
  keys.push_back(std::move(key));
  items.push_back(std::move(value));
}

bool Value::operator==(const Value& other) const {
  if (kind != other.kind) return false;
  switch (kind) {
    case Kind::null:
      return true;
    case Kind::boolean:
      return boolean == other.boolean;
    case Kind::integer:
      return integer == other.integer;
    case Kind::real:
      return real == other.real || (std::isnan(real) && std::isnan(other.real));
    case Kind::text:
      return resolved.empty() || other.resolved.empty() ? text == other.text : resolved == other.resolved;
    case Kind::list:
      return items == other.items;
    case Kind::map:
      return keys == other.keys && items == other.items;
  }
  return false;
}

}  // namespace capstan::config
