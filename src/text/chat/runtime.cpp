#include "text/chat/runtime.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::text::chat {

void Runtime::unsupported(const std::string& what) const {
  source_.fail_at(at, what + " is not supported in chat templates here", ErrorCode::unsupported);
}

void Runtime::out_of(const char* what, int64_t limit) const {
  error("the template takes more than " + with_separators(limit) + " " + what);
}

Value Runtime::list(List items, bool tuple) {
  charge(static_cast<int64_t>(items.size() * sizeof(Value)));
  for (const Value& item : items)
    if (!item.is_data()) unsupported(std::string("a ") + item.type_name() + " inside of a list");
  auto value = Value::list(std::move(items), tuple);
  if (!value) error("a list that is too deep or too large");
  return std::move(*value);
}

Value Runtime::map(Map map) {
  charge(static_cast<int64_t>(map.size() * (sizeof(Value) + sizeof(std::string))));
  for (const auto& item : map.items())
    if (!item.second.is_data())
      unsupported(std::string("a ") + item.second.type_name() + " inside of a dict");
  auto value = Value::map(std::move(map));
  if (!value) error("a dict that is too deep or too large");
  return std::move(*value);
}

std::string Runtime::printed(const Value& value) {
  charge(value.weight());
  std::string out;
  print(value, out);
  return out;
}

bool Runtime::before(const Value& a, const Value& b) {
  step(1 + std::min(a.weight(), b.weight()) / 64);
  const auto result = less(a, b);
  if (!result) error(std::string("there is no order between ") + a.type_name() + " and " + b.type_name());
  return *result;
}

List Runtime::items_of(const Value& value) {
  List items;
  if (value.is_undefined()) return items;
  if (const List* list = value.list()) {
    charge(static_cast<int64_t>(list->size() * sizeof(Value)));
    return *list;
  }
  if (const Map* map = value.map()) {
    for (const auto& item : map->items()) items.push_back(text(item.first));
    return items;
  }
  if (const auto* text = value.text()) {
    charge(static_cast<int64_t>(text->size() * 2 * sizeof(Value)));
    for (size_t i = 0; i < text->size();) {
      const auto length = static_cast<size_t>(decode_utf8(*text, i).bytes);
      items.push_back(Value(text->substr(i, length)));
      i += length;
    }
    return items;
  }
  error(std::string("a ") + value.type_name() + " is not iterable");
}

namespace {

Value loop_attribute(Runtime& runtime, const LoopNode& loop, std::string_view name) {
  const List& items = loop.items->items;
  const auto count = static_cast<int64_t>(items.size());
  if (name == "index") return Value(loop.index + 1);
  if (name == "index0") return Value(loop.index);
  if (name == "revindex") return Value(count - loop.index);
  if (name == "revindex0") return Value(count - loop.index - 1);
  if (name == "first") return Value(loop.index == 0);
  if (name == "last") return Value(loop.index + 1 == count);
  if (name == "length") return Value(count);
  // Recursive loops are not supported, so the depth is always 1.
  if (name == "depth") return Value(int64_t{1});
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem")
    return loop.index > 0 ? items[static_cast<size_t>(loop.index) - 1]
                          : Value::undefined("there is no previous item");
  if (name == "nextitem")
    return loop.index + 1 < count ? items[static_cast<size_t>(loop.index) + 1]
                                  : Value::undefined("there is no next item");
  if (name == "cycle" || name == "changed") runtime.unsupported("`loop." + std::string(name) + "`");
  return Value::undefined(std::string(name));
}

Value method(const Value& self, std::string_view name) {
  auto node = std::make_shared<CallableNode>();
  node->self = self;
  node->name = name;
  return Value(std::shared_ptr<const CallableNode>(std::move(node)));
}

// Resolves a Python index, which may be negative; nullopt if it is out of range.
std::optional<size_t> item_index(int64_t index, size_t size) {
  const auto count = static_cast<int64_t>(size);
  if (index < 0) index += count;
  if (index < 0 || index >= count) return std::nullopt;
  return static_cast<size_t>(index);
}

}  // namespace

// An attribute of the object (a method) takes precedence over an item of that name, as in Jinja2.
Value Runtime::attribute(const Value& base, std::string_view name) {
  if (base.is_undefined()) {
    const auto& looked_up = base.as<Undefined>()->name;
    error((looked_up && !looked_up->empty() ? "`" + *looked_up + "` is undefined"
                                            : std::string("an undefined value")) +
          " and has no `" + std::string(name) + "`");
  }
  if (const NamespaceNode* names = base.name_space()) {
    const Value* found = names->attributes.find(name);
    return found ? *found : Value::undefined(std::string(name));
  }
  if (const LoopNode* loop = base.loop()) return loop_attribute(*this, *loop, name);
  if (has_method(base, name)) return method(base, name);
  if (const Map* map = base.map())
    if (const Value* found = map->find(name)) return *found;
  return Value::undefined(std::string(name));
}

Value Runtime::subscript(const Value& base, const Value& key) {
  if (const std::string* name = key.text()) {
    if (const Map* map = base.map())
      if (const Value* found = map->find(*name)) return *found;
    return attribute(base, *name);
  }
  const auto index = key.integer();
  if (base.is_undefined()) return attribute(base, printed(key));
  if (!index) {
    if (base.list() || base.text() || base.map()) return Value::undefined(printed(key));
    error(std::string("a ") + base.type_name() + " has no items");
  }
  if (const List* list = base.list()) {
    const auto item = item_index(*index, list->size());
    return item ? (*list)[*item] : Value::undefined("item " + std::to_string(*index));
  }
  if (const std::string* text = base.text()) {
    step(static_cast<int64_t>(text->size()) / 64);
    const auto item = item_index(*index, count_code_points(*text));
    if (!item) return Value::undefined("character " + std::to_string(*index));
    size_t offset = 0;
    for (size_t i = 0; i < *item; ++i) offset += static_cast<size_t>(decode_utf8(*text, offset).bytes);
    return Value(text->substr(offset, static_cast<size_t>(decode_utf8(*text, offset).bytes)));
  }
  return Value::undefined("item " + std::to_string(*index));
}

Value Runtime::slice(const Value& base, const Value& from, const Value& to, const Value& by) {
  const bool is_text = base.text() != nullptr;
  if (!is_text && !base.list()) error(std::string("a ") + base.type_name() + " cannot be sliced");
  const auto bound = [&](const Value& value) -> std::optional<int64_t> {
    if (value.is_none()) return std::nullopt;
    return integer("a slice", value);
  };
  const int64_t stride = bound(by).value_or(1);
  if (stride == 0) error("a slice with step 0");
  const List items = items_of(base);
  const auto count = static_cast<int64_t>(items.size());
  const auto clamp = [&](std::optional<int64_t> value, int64_t otherwise) {
    if (!value) return otherwise;
    if (*value < 0) *value = *value < -count ? -1 : *value + count;
    return stride > 0 ? std::clamp<int64_t>(*value, 0, count) : std::clamp<int64_t>(*value, -1, count - 1);
  };
  int64_t begin = clamp(bound(from), stride > 0 ? 0 : count - 1);
  const int64_t end = clamp(bound(to), stride > 0 ? count : -1);
  List chosen;
  std::string characters;
  for (; stride > 0 ? begin < end : begin > end;) {
    const Value& item = items[static_cast<size_t>(begin)];
    if (is_text)
      characters += *item.text();
    else
      chosen.push_back(item);
    if (__builtin_add_overflow(begin, stride, &begin)) break;
  }
  return is_text ? text(std::move(characters)) : list(std::move(chosen), base.list_node()->tuple);
}

bool Runtime::contains(const Value& container, const Value& item) {
  if (container.is_undefined()) return false;
  if (const std::string* text = container.text()) {
    const std::string& part = words("`in` a text", item);
    step(static_cast<int64_t>(text->size()) / 16);
    return text->find(part) != std::string::npos;
  }
  if (const Map* map = container.map()) return item.text() && map->find(*item.text());
  if (const List* list = container.list())
    return std::any_of(list->begin(), list->end(), [&](const Value& one) { return same(one, item); });
  error(std::string("a ") + container.type_name() + " has no items to look through");
}

Value Runtime::binary(std::string_view op, const Value& a, const Value& b) {
  const auto wrong = [&]() -> Value {
    for (const Value* value : {&a, &b})
      if (const auto* undefined = value->as<Undefined>())
        error((undefined->name && !undefined->name->empty() ? "`" + *undefined->name + "`"
                                                            : std::string("a value")) +
              " is undefined");
    error("`" + std::string(op) + "` cannot combine " + a.type_name() + " and " + b.type_name());
  };
  const auto x = a.integer(), y = b.integer();
  if (x && y) {
    int64_t result = 0;
    if (op == "+") {
      if (!__builtin_add_overflow(*x, *y, &result)) return Value(result);
    } else if (op == "-") {
      if (!__builtin_sub_overflow(*x, *y, &result)) return Value(result);
    } else if (op == "*") {
      if (!__builtin_mul_overflow(*x, *y, &result)) return Value(result);
    } else if (op == "**") {
      if (*y < 0) return Value(std::pow(static_cast<double>(*x), static_cast<double>(*y)));
      result = 1;
      bool fits = true;
      for (int64_t i = 0; i < *y && fits && result != 0 && (*x < -1 || *x > 1 || i < 2); ++i)
        fits = !__builtin_mul_overflow(result, *x, &result);
      if (*x == -1) result = *y % 2 == 0 ? 1 : -1;
      if (fits) return Value(result);
    } else {
      if (*y == 0) error("a division by zero");
      if (op == "/") return Value(static_cast<double>(*x) / static_cast<double>(*y));
      if (*y == -1) {
        if (op == "%") return Value(int64_t{0});
        if (!__builtin_sub_overflow(int64_t{0}, *x, &result)) return Value(result);
      } else {
        // The quotient is rounded down, as in Python.
        const int64_t rest = *x % *y, adjust = rest != 0 && (rest < 0) != (*y < 0) ? 1 : 0;
        return Value(op == "%" ? rest + adjust * *y : *x / *y - adjust);
      }
    }
    error("a number that does not fit 64 bits");
  }
  if (a.is_number() && b.is_number()) {
    const double p = *a.number(), q = *b.number();
    if (op == "+") return Value(p + q);
    if (op == "-") return Value(p - q);
    if (op == "*") return Value(p * q);
    if (op == "**") return Value(std::pow(p, q));
    if (q == 0) error("a division by zero");
    if (op == "/") return Value(p / q);
    const double quotient = std::floor(p / q);
    return Value(op == "//" ? quotient : p - quotient * q);
  }
  if (op == "+") {
    if (a.text() && b.text()) {
      charge(static_cast<int64_t>(a.text()->size() + b.text()->size()));
      return Value(*a.text() + *b.text());
    }
    if (a.list() && b.list() && a.list_node()->tuple == b.list_node()->tuple) {
      List items = items_of(a);
      const List more = items_of(b);
      items.insert(items.end(), more.begin(), more.end());
      return list(std::move(items), a.list_node()->tuple);
    }
  }
  if (op == "*" && (x || y)) {
    const Value& repeated = x ? b : a;
    const int64_t times = std::max<int64_t>(0, x ? *x : *y);
    int64_t bytes = 0;
    if (repeated.text() || repeated.list()) {
      if (__builtin_mul_overflow(times, repeated.weight() + 1, &bytes))
        out_of("bytes of texts and lists", limits_.bytes);
      charge(bytes);
    }
    if (const std::string* text = repeated.text()) {
      std::string result;
      for (int64_t i = 0; i < times; ++i) result += *text;
      return Value(std::move(result));
    }
    if (const List* items = repeated.list()) {
      List result;
      for (int64_t i = 0; i < times; ++i) result.insert(result.end(), items->begin(), items->end());
      return list(std::move(result), repeated.list_node()->tuple);
    }
  }
  if (op == "%" && a.text()) unsupported("formatting with `%`");
  return wrong();
}

std::vector<std::optional<Value>> Runtime::bind(std::string_view what, const Arguments& given,
                                                std::initializer_list<std::string_view> names,
                                                size_t required) const {
  std::vector<std::optional<Value>> result(names.size());
  if (given.positional.size() > names.size())
    error("`" + std::string(what) + "` takes at most " + std::to_string(names.size()) + " arguments, not " +
          std::to_string(given.positional.size()));
  for (size_t i = 0; i < given.positional.size(); ++i) result[i] = given.positional[i];
  for (const auto& [name, value] : given.named) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) error("`" + std::string(what) + "` has no argument `" + name + "`");
    auto& slot = result[static_cast<size_t>(found - names.begin())];
    if (slot) error("`" + std::string(what) + "` gets its argument `" + name + "` twice");
    slot = value;
  }
  for (size_t i = 0; i < required; ++i)
    if (!result[i])
      error("`" + std::string(what) + "` lacks its argument `" + std::string(*(names.begin() + i)) + "`");
  return result;
}

int64_t Runtime::integer(std::string_view what, const Value& value) const {
  const auto result = value.integer();
  if (!result) error(std::string(what) + " needs an integer, not a " + value.type_name());
  return *result;
}

const std::string& Runtime::words(std::string_view what, const Value& value) const {
  if (!value.text()) error(std::string(what) + " needs a text, not a " + value.type_name());
  return *value.text();
}

}  // namespace capstan::text::chat
