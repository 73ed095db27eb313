#include "text/chat/value.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "base/utf8.hpp"

namespace capstan::text::chat {

void Map::set(std::string_view key, Value value) {
  for (auto& item : items_) {
    if (!index_.empty()) break;
    if (item.first == key) {
      item.second = std::move(value);
      return;
    }
  }
  if (!index_.empty()) {
    if (const auto found = index_.find(std::string(key)); found != index_.end()) {
      items_[found->second].second = std::move(value);
      return;
    }
    index_.emplace(key, items_.size());
  }
  items_.emplace_back(key, std::move(value));
  if (index_.empty() && items_.size() >= kIndexed)
    for (size_t i = 0; i < items_.size(); ++i) index_.emplace(items_[i].first, i);
}

const Value* Map::find(std::string_view key) const {
  if (!index_.empty()) {
    const auto found = index_.find(std::string(key));
    return found == index_.end() ? nullptr : &items_[found->second].second;
  }
  for (const auto& item : items_)
    if (item.first == key) return &item.second;
  return nullptr;
}

Value Value::undefined(std::string name) {
  Value value;
  value.data_ = Undefined{std::make_shared<const std::string>(std::move(name))};
  return value;
}

namespace {
// Adds an element to the depth and weight of a list or map.
struct Measure {
  int depth = 1;
  int64_t weight = 2;
  bool add(const Value& part, size_t key = 0) {
    depth = std::max(depth, part.depth() + 1);
    weight += part.weight() + static_cast<int64_t>(key) + 4;
    return part.is_data() && depth <= Value::kMaxDepth && weight <= Value::kMaxWeight;
  }
};
}  // namespace

std::optional<Value> Value::list(List items, bool tuple) {
  Measure measure;
  for (const Value& item : items)
    if (!measure.add(item)) return std::nullopt;
  Value value;
  value.data_ =
      std::make_shared<const ListNode>(ListNode{std::move(items), tuple, measure.depth, measure.weight});
  return value;
}

std::optional<Value> Value::map(Map map) {
  Measure measure;
  for (const auto& item : map.items())
    if (!measure.add(item.second, item.first.size())) return std::nullopt;
  Value value;
  value.data_ = std::make_shared<const MapNode>(MapNode{std::move(map), measure.depth, measure.weight});
  return value;
}

std::optional<int64_t> Value::integer() const {
  if (const auto* value = as<int64_t>()) return *value;
  if (const auto* value = as<bool>()) return *value ? 1 : 0;
  return std::nullopt;
}

std::optional<double> Value::number() const {
  if (const auto* value = as<double>()) return *value;
  if (const auto value = integer()) return static_cast<double>(*value);
  return std::nullopt;
}

bool Value::truthy() const {
  if (is_undefined() || is_none()) return false;
  if (const auto value = number()) return *value != 0;
  if (const auto* value = text()) return !value->empty();
  if (const auto* value = list()) return !value->empty();
  if (const auto* value = map()) return value->size() > 0;
  return true;
}

int Value::depth() const {
  if (const ListNode* node = list_node()) return node->depth;
  if (const auto* node = as<std::shared_ptr<const MapNode>>()) return (*node)->depth;
  return 0;
}

int64_t Value::weight() const {
  if (const auto* value = text()) return static_cast<int64_t>(value->size()) + 2;
  if (const ListNode* node = list_node()) return node->weight;
  if (const auto* node = as<std::shared_ptr<const MapNode>>()) return (*node)->weight;
  return 8;
}

const char* Value::type_name() const {
  if (is_undefined()) return "undefined";
  if (is_none()) return "None";
  if (as<bool>()) return "bool";
  if (as<int64_t>()) return "int";
  if (as<double>()) return "float";
  if (text()) return "str";
  if (const ListNode* node = list_node()) return node->tuple ? "tuple" : "list";
  if (map()) return "dict";
  if (name_space()) return "namespace";
  if (loop()) return "loop";
  return "function";
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    const auto x = a.integer(), y = b.integer();
    return x && y ? *x == *y : *a.number() == *b.number();
  }
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.text() && b.text()) return *a.text() == *b.text();
  if (a.list() && b.list())
    return a.list_node()->tuple == b.list_node()->tuple &&
           std::equal(a.list()->begin(), a.list()->end(), b.list()->begin(), b.list()->end(), equal);
  if (a.map() && b.map()) {
    if (a.map()->size() != b.map()->size()) return false;
    return std::all_of(a.map()->items().begin(), a.map()->items().end(), [&](const auto& item) {
      const Value* other = b.map()->find(item.first);
      return other && equal(item.second, *other);
    });
  }
  if (a.name_space() || b.name_space()) return a.name_space() == b.name_space();
  return a.callable() && a.callable() == b.callable();
}

std::optional<bool> less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    const auto x = a.integer(), y = b.integer();
    return x && y ? *x < *y : *a.number() < *b.number();
  }
  if (a.text() && b.text()) return *a.text() < *b.text();
  if (a.list() && b.list() && a.list_node()->tuple == b.list_node()->tuple) {
    const List &x = *a.list(), &y = *b.list();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!equal(x[i], y[i])) return less(x[i], y[i]);
    return x.size() < y.size();
  }
  return std::nullopt;
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view scientific(buffer, static_cast<size_t>(end - buffer));
  const size_t e = scientific.find('e');
  int exponent = 0;
  const size_t sign = scientific[e + 1] == '+' ? 1 : 0;
  std::from_chars(scientific.data() + e + 1 + sign, scientific.data() + scientific.size(), exponent);
  std::string digits;
  for (const char c : scientific.substr(0, e))
    if (c != '.' && c != '-') digits += c;
  std::string out = std::signbit(value) ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    out += digits.substr(0, 1);
    if (digits.size() > 1) out += "." + digits.substr(1);
    char tail[16];
    std::snprintf(tail, sizeof tail, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
    return out + tail;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto before_point = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= before_point)
    return out + digits + std::string(before_point - digits.size(), '0') + ".0";
  return out + digits.substr(0, before_point) + "." + digits.substr(before_point);
}

namespace {

void print_text_repr(std::string_view text, std::string& out) {
  const char quote =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = decode_utf8(text, i);
    const auto length = static_cast<size_t>(point.bytes);
    const char32_t c = point.value;
    char escape[16];
    if (c == static_cast<unsigned char>(quote) || c == '\\')
      (out += '\\') += static_cast<char>(c);
    else if (c == '\n')
      out += "\\n";
    else if (c == '\r')
      out += "\\r";
    else if (c == '\t')
      out += "\\t";
    else if (c < 0x20 || (c >= 0x7f && c <= 0xa0) || c == 0xad)
      std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned>(c)), out += escape;
    else
      out += text.substr(i, length);
    i += length;
  }
  out += quote;
}

void print_json_text(std::string_view text, bool ascii, std::string& out) {
  out += '"';
  const auto unit = [&](unsigned value) {
    char escape[16];
    std::snprintf(escape, sizeof escape, "\\u%04x", value);
    out += escape;
  };
  for (size_t i = 0; i < text.size();) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x80) {
      const CodePoint point = decode_utf8(text, i);
      const auto length = static_cast<size_t>(point.bytes);
      const auto value = static_cast<unsigned>(point.value);
      if (!ascii)
        out += text.substr(i, length);
      else if (value < 0x10000)
        unit(value);
      else
        unit(0xD800 + ((value - 0x10000) >> 10)), unit(0xDC00 + ((value - 0x10000) & 0x3FF));
      i += length;
      continue;
    }
    ++i;
    constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kNames = "\"\\nrtbf";
    if (const size_t name = kEscaped.find(static_cast<char>(c)); name != std::string_view::npos)
      (out += '\\') += kNames[name];
    else if (c < 0x20)
      unit(c);
    else
      out += static_cast<char>(c);
  }
  out += '"';
}

}  // namespace

void print_repr(const Value& value, std::string& out) {
  if (const auto* text = value.text()) {
    print_text_repr(*text, out);
  } else if (const List* list = value.list()) {
    const bool tuple = value.list_node()->tuple;
    out += tuple ? '(' : '[';
    for (size_t i = 0; i < list->size(); ++i) {
      if (i > 0) out += ", ";
      print_repr((*list)[i], out);
    }
    if (tuple && list->size() == 1) out += ',';
    out += tuple ? ')' : ']';
  } else if (const Map* map = value.map()) {
    out += '{';
    for (size_t i = 0; i < map->size(); ++i) {
      if (i > 0) out += ", ";
      print_text_repr(map->items()[i].first, out);
      out += ": ";
      print_repr(map->items()[i].second, out);
    }
    out += '}';
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else {
    print(value, out);
  }
}

void print(const Value& value, std::string& out) {
  if (value.is_undefined()) return;
  if (value.is_none())
    out += "None";
  else if (const auto* flag = value.as<bool>())
    out += *flag ? "True" : "False";
  else if (const auto* integer = value.as<int64_t>())
    out += std::to_string(*integer);
  else if (const auto* real = value.as<double>())
    out += number_text(*real);
  else if (const auto* text = value.text())
    out += *text;
  else if (value.list() || value.map())
    print_repr(value, out);
  else
    (out += '<') += std::string(value.type_name()) + ">";
}

bool print_json(const Value& value, const JsonStyle& style, std::string& out, size_t level) {
  const auto line = [&](size_t at) {
    if (!style.indent) return;
    out += '\n';
    for (size_t i = 0; i < at; ++i) out += *style.indent;
  };
  if (value.is_none()) {
    out += "null";
  } else if (const auto* flag = value.as<bool>()) {
    out += *flag ? "true" : "false";
  } else if (const auto* integer = value.as<int64_t>()) {
    out += std::to_string(*integer);
  } else if (const auto* real = value.as<double>()) {
    out += std::isnan(*real)   ? "NaN"
           : std::isinf(*real) ? (*real < 0 ? "-Infinity" : "Infinity")
                               : number_text(*real);
  } else if (const auto* text = value.text()) {
    print_json_text(*text, style.ascii, out);
  } else if (const List* list = value.list()) {
    out += '[';
    for (size_t i = 0; i < list->size(); ++i) {
      if (i > 0) out += style.item_separator;
      line(level + 1);
      if (!print_json((*list)[i], style, out, level + 1)) return false;
    }
    if (!list->empty()) line(level);
    out += ']';
  } else if (const Map* map = value.map()) {
    std::vector<const std::pair<std::string, Value>*> items;
    for (const auto& item : map->items()) items.push_back(&item);
    if (style.sort_keys)
      std::sort(items.begin(), items.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
    out += '{';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += style.item_separator;
      line(level + 1);
      print_json_text(items[i]->first, style.ascii, out);
      out += style.key_separator;
      if (!print_json(items[i]->second, style, out, level + 1)) return false;
    }
    if (!items.empty()) line(level);
    out += '}';
  } else {
    return false;
  }
  return true;
}

size_t blank_at(std::string_view text, size_t offset) {
  const auto c = static_cast<unsigned char>(text[offset]);
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) ? 1 : 0;
  const CodePoint point = decode_utf8(text, offset);
  const char32_t v = point.value;
  const bool blank = v == 0x85 || v == 0xa0 || v == 0x1680 || (v >= 0x2000 && v <= 0x200a) || v == 0x2028 ||
                     v == 0x2029 || v == 0x202f || v == 0x205f || v == 0x3000;
  return blank ? static_cast<size_t>(point.bytes) : 0;
}

std::string_view strip_front(std::string_view text) {
  while (!text.empty()) {
    const size_t blank = blank_at(text, 0);
    if (blank == 0) break;
    text.remove_prefix(blank);
  }
  return text;
}

std::string_view strip_back(std::string_view text) {
  while (!text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && text.size() - start < 4 && is_continuation(text[start])) --start;
    const size_t blank = blank_at(text, start);
    if (blank == 0 || start + blank != text.size()) break;
    text.remove_suffix(blank);
  }
  return text;
}

}  // namespace capstan::text::chat
