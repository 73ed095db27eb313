// Filters, tests, methods and global functions, each by its name in Jinja2 or Python.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "text/chat/runtime.hpp"
#include "text/chat/text_functions.hpp"

namespace capstan::text::chat {

namespace {

using Bound = std::vector<std::optional<Value>>;
template <class Function>
struct Named {
  std::string_view name;
  Function function;
};
template <class Table>
auto find_named(const Table& table, std::string_view name) {
  return std::find_if(std::begin(table), std::end(table),
                      [&](const auto& entry) { return entry.name == name; });
}
template <class Table>
[[noreturn]] void no_such(Runtime& runtime, const char* kind, std::string_view name, const Table& table) {
  std::vector<std::string> names;
  for (const auto& entry : table) names.emplace_back(entry.name);
  const auto near = near_matches(name, names, 1);
  runtime.unsupported(std::string("the ") + kind + " `" + std::string(name) + "`" +
                      (near.empty() ? "" : " (near: `" + near[0] + "`)"));
}

// --- helpers of the filters

std::string text_of(Runtime& runtime, const Value& value) {
  return runtime.printed(value);
}
Value texts(Runtime& runtime, std::vector<std::string> parts) {
  List items;
  items.reserve(parts.size());
  for (std::string& part : parts) items.push_back(runtime.text(std::move(part)));
  return runtime.list(std::move(items));
}
// `attribute='a.b'` or `attribute=0`.
Value looked_up(Runtime& runtime, Value item, const Value& path) {
  if (!path.text()) return runtime.subscript(item, path);
  for (const std::string_view part : split(*path.text(), '.')) {
    const auto index = parse_int(part);
    item = runtime.subscript(item, index ? Value(*index) : Value(std::string(part)));
  }
  return item;
}
// The item, or the attribute of it that the argument `attribute` names.
Value item_or_attribute(Runtime& runtime, const Value& item, const std::optional<Value>& path) {
  return path && !path->is_none() ? looked_up(runtime, item, *path) : item;
}
// The sort key of a value, which ignores case if requested.
Value folded(Runtime& runtime, const Value& value, bool sensitive) {
  return !sensitive && value.text() ? runtime.text(lower(*value.text())) : value;
}

void sort_items(Runtime& runtime, List& items, List& keys, bool reverse) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  // An exception from the comparison is harmless, because `order` is discarded.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return reverse ? runtime.before(keys[b], keys[a]) : runtime.before(keys[a], keys[b]);
  });
  List sorted;
  for (const size_t i : order) sorted.push_back(items[i]);
  items = std::move(sorted);
}

JsonStyle json_style(Runtime& runtime, const Bound& a) {
  JsonStyle style;
  // Characters of an indent or separator.
  constexpr int64_t kMaxIndent = 16;
  if (a[0] && !a[0]->is_none()) {
    style.item_separator = ",";
    if (const auto width = a[0]->integer())
      style.indent = std::string(static_cast<size_t>(std::clamp<int64_t>(*width, 0, kMaxIndent + 1)), ' ');
    else
      style.indent = runtime.words("`indent`", *a[0]);
  }
  if (a[1] && !a[1]->is_none()) {
    const List pair = runtime.items_of(*a[1]);
    if (pair.size() != 2) runtime.error("`separators` are two texts");
    style.item_separator = runtime.words("`separators`", pair[0]);
    style.key_separator = runtime.words("`separators`", pair[1]);
  }
  if (std::max({style.indent.value_or("").size(), style.item_separator.size(), style.key_separator.size()}) >
      kMaxIndent)
    runtime.error("an indent or separator of more than " + std::to_string(kMaxIndent) + " characters");
  style.ascii = a[2] && a[2]->truthy();
  style.sort_keys = a[3] && a[3]->truthy();
  return style;
}

// The items for which the test, of themselves or of an attribute, returns `wanted`.
Value chosen(Runtime& runtime, const Value& value, const Arguments& arguments, bool by_attribute,
             bool wanted) {
  Arguments rest = arguments;
  if (!rest.named.empty()) runtime.unsupported("a named argument here");
  std::optional<Value> path;
  const auto take = [&]() -> std::optional<Value> {
    if (rest.positional.empty()) return std::nullopt;
    Value first = std::move(rest.positional.front());
    rest.positional.erase(rest.positional.begin());
    return first;
  };
  if (by_attribute) {
    path = take();
    if (!path) runtime.error("the name of an attribute is missing");
  }
  const auto test = take();
  List kept;
  for (const Value& item : runtime.items_of(value)) {
    runtime.step();
    const Value looked = path ? looked_up(runtime, item, *path) : item;
    const bool holds =
        test ? apply_test(runtime, runtime.words("a test", *test), looked, rest) : looked.truthy();
    if (holds == wanted) kept.push_back(item);
  }
  return runtime.list(std::move(kept));
}

Value extreme(Runtime& runtime, const Value& value, const Arguments& arguments, bool largest) {
  const auto a = runtime.bind(largest ? "max" : "min", arguments, {"case_sensitive", "attribute"});
  const bool sensitive = a[0] && a[0]->truthy();
  std::optional<Value> best, best_key;
  for (const Value& item : runtime.items_of(value)) {
    const Value key = folded(runtime, a[1] ? looked_up(runtime, item, *a[1]) : item, sensitive);
    if (best_key && !(largest ? runtime.before(*best_key, key) : runtime.before(key, *best_key))) continue;
    best = item, best_key = key;
  }
  return best ? *best : Value::undefined("no item");
}

int64_t size_of(Runtime& runtime, const Value& value) {
  if (value.is_undefined()) return 0;
  if (const List* list = value.list()) return static_cast<int64_t>(list->size());
  if (const Map* map = value.map()) return static_cast<int64_t>(map->size());
  if (const std::string* text = value.text()) {
    runtime.step(static_cast<int64_t>(text->size()) / 64);
    return static_cast<int64_t>(count_code_points(*text));
  }
  runtime.error(std::string("a ") + value.type_name() + " has no length");
}

Value replaced_text(Runtime& runtime, const std::string& text, const Bound& a) {
  const std::string from = text_of(runtime, *a[0]), to = text_of(runtime, *a[1]);
  const int64_t most = a[2] && !a[2]->is_none() ? runtime.integer("`count`", *a[2]) : -1;
  // The size of the result is checked before any text is created.
  const auto matches = static_cast<int64_t>(text.size() / std::max<size_t>(1, from.size())) + 1;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(most < 0 ? matches : std::min(most, matches), static_cast<int64_t>(to.size()),
                             &bytes))
    runtime.out_of("bytes of texts and lists", runtime.limits().bytes);
  if (to.size() > from.size()) runtime.charge(bytes);
  return runtime.text(replaced(text, from, to, most));
}

Value indented(Runtime& runtime, const Value& value, const Bound& a) {
  std::string by = "    ";
  if (a[0]) {
    if (const auto width = a[0]->integer()) {
      if (*width > 1000) runtime.error("an indent of more than 1000 characters");
      by = std::string(static_cast<size_t>(std::max<int64_t>(0, *width)), ' ');
    } else {
      by = runtime.words("`indent`", *a[0]);
    }
  }
  const bool first = a[1] && a[1]->truthy(), blank = a[2] && a[2]->truthy();
  const std::string text = text_of(runtime, value);
  const auto lines = static_cast<int64_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  runtime.charge(lines * static_cast<int64_t>(by.size()));
  std::string out;
  bool at_first = true;
  for (const std::string_view line : split(text, '\n')) {
    if (!at_first) out += '\n';
    if (at_first ? first : blank || !line.empty()) out += by;
    out += line;
    at_first = false;
  }
  return runtime.text(std::move(out));
}

Value as_integer(Runtime& runtime, const Value& value, const Bound& a) {
  Value otherwise = a[0] ? *a[0] : Value(int64_t{0});
  if (const auto integer = value.integer()) return Value(*integer);
  std::optional<double> real = value.number();
  if (const std::string* text = value.text()) {
    if (a[1] && runtime.integer("`base`", *a[1]) != 10) runtime.unsupported("another base than 10");
    if (const auto integer = parse_int(trim(*text))) return Value(*integer);
    real = parse_double(trim(*text));
  }
  if (!real || !std::isfinite(*real) || std::fabs(*real) > 9e18) return otherwise;
  return Value(static_cast<int64_t>(*real));
}

Value rounded(Runtime& runtime, const Value& value, const Bound& a) {
  const auto number = value.number();
  if (!number) runtime.error(std::string("a ") + value.type_name() + " cannot be rounded");
  const int64_t digits = a[0] ? runtime.integer("`precision`", *a[0]) : 0;
  const std::string method = a[1] ? runtime.words("`method`", *a[1]) : "common";
  const double scale = std::pow(10.0, static_cast<double>(digits));
  if (method == "ceil") return Value(std::ceil(*number * scale) / scale);
  if (method == "floor") return Value(std::floor(*number * scale) / scale);
  if (method != "common") runtime.error("`round` rounds by common, ceil or floor");
  // Rounds the decimal value half to even, as Python's round().
  if (digits >= 0 && digits <= 300)
    return Value(parse_double(fixed(*number, static_cast<int>(digits))).value_or(*number));
  return Value(std::nearbyint(*number * scale) / scale);
}

using Filter = Value (*)(Runtime&, const Value&, const Arguments&);
// A filter without arguments on the text of its value.
template <auto function>
Value on_text(Runtime& runtime, const Value& value, const Arguments& arguments) {
  runtime.bind("this filter", arguments, {});
  return runtime.text(function(text_of(runtime, value)));
}

const Named<Filter> kFilters[] = {
    {"abs",
     [](Runtime& r, const Value& v, const Arguments&) {
       if (!v.is_number()) r.error(std::string("a ") + v.type_name() + " has no absolute value");
       return r.before(v, Value(int64_t{0})) ? r.binary("-", Value(int64_t{0}), v) : v;
     }},
    {"capitalize", on_text<capitalized>},
    {"count", [](Runtime& r, const Value& v, const Arguments&) { return Value(size_of(r, v)); }},
    {"default",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("default", given, {"default_value", "boolean"});
       const bool missing = v.is_undefined() || (a[1] && a[1]->truthy() && !v.truthy());
       return !missing ? v : a[0] ? *a[0] : Value("");
     }},
    {"dictsort",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("dictsort", given, {"case_sensitive", "by", "reverse"});
       if (!v.map()) r.error(std::string("`dictsort` needs a dict, not a ") + v.type_name());
       const bool by_value = a[1] && r.words("`by`", *a[1]) == "value";
       List items, keys;
       for (const auto& item : v.map()->items()) {
         items.push_back(r.list({r.text(item.first), item.second}, true));
         keys.push_back(folded(r, by_value ? item.second : Value(item.first), a[0] && a[0]->truthy()));
       }
       sort_items(r, items, keys, a[2] && a[2]->truthy());
       return r.list(std::move(items));
     }},
    {"first",
     [](Runtime& r, const Value& v, const Arguments&) {
       const List items = r.items_of(v);
       return items.empty() ? Value::undefined("the first of nothing") : items.front();
     }},
    {"float",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("float", given, {"default"});
       auto number = v.number();
       if (v.text()) number = parse_double(trim(*v.text()));
       return number ? Value(*number) : a[0] ? *a[0] : Value(0.0);
     }},
    {"indent",
     [](Runtime& r, const Value& v, const Arguments& given) {
       return indented(r, v, r.bind("indent", given, {"width", "first", "blank"}));
     }},
    {"int",
     [](Runtime& r, const Value& v, const Arguments& given) {
       return as_integer(r, v, r.bind("int", given, {"default", "base"}));
     }},
    {"items",
     [](Runtime& r, const Value& v, const Arguments&) {
       List items;
       if (!v.is_undefined() && !v.map())
         r.error(std::string("`items` needs a dict, not a ") + v.type_name());
       if (v.map())
         for (const auto& item : v.map()->items())
           items.push_back(r.list({r.text(item.first), item.second}, true));
       return r.list(std::move(items));
     }},
    {"join",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("join", given, {"d", "attribute"});
       const std::string between = a[0] ? text_of(r, *a[0]) : "";
       std::string out;
       bool first = true;
       for (const Value& item : r.items_of(v)) {
         const std::string part = text_of(r, a[1] ? looked_up(r, item, *a[1]) : item);
         r.charge(static_cast<int64_t>(part.size() + between.size()));
         if (!std::exchange(first, false)) out += between;
         out += part;
       }
       return Value(std::move(out));
     }},
    {"last",
     [](Runtime& r, const Value& v, const Arguments&) {
       const List items = r.items_of(v);
       return items.empty() ? Value::undefined("the last of nothing") : items.back();
     }},
    {"length", [](Runtime& r, const Value& v, const Arguments&) { return Value(size_of(r, v)); }},
    {"list", [](Runtime& r, const Value& v, const Arguments&) { return r.list(r.items_of(v)); }},
    {"lower", on_text<lower>},
    {"map",
     [](Runtime& r, const Value& v, const Arguments& given) {
       List mapped;
       if (given.positional.empty()) {
         const auto a = r.bind("map", given, {"attribute", "default"}, 1);
         for (const Value& item : r.items_of(v)) {
           r.step();
           const Value found = looked_up(r, item, *a[0]);
           mapped.push_back(found.is_undefined() && a[1] ? *a[1] : found);
         }
         return r.list(std::move(mapped));
       }
       Arguments rest = given;
       rest.positional.erase(rest.positional.begin());
       const std::string& name = r.words("the name of a filter", given.positional[0]);
       for (const Value& item : r.items_of(v)) {
         r.step();
         mapped.push_back(apply_filter(r, name, item, rest));
       }
       return r.list(std::move(mapped));
     }},
    {"max", [](Runtime& r, const Value& v, const Arguments& given) { return extreme(r, v, given, true); }},
    {"min", [](Runtime& r, const Value& v, const Arguments& given) { return extreme(r, v, given, false); }},
    {"reject",
     [](Runtime& r, const Value& v, const Arguments& given) { return chosen(r, v, given, false, false); }},
    {"rejectattr",
     [](Runtime& r, const Value& v, const Arguments& given) { return chosen(r, v, given, true, false); }},
    {"replace",
     [](Runtime& r, const Value& v, const Arguments& given) {
       return replaced_text(r, text_of(r, v), r.bind("replace", given, {"old", "new", "count"}, 2));
     }},
    {"reverse",
     [](Runtime& r, const Value& v, const Arguments&) {
       if (v.text()) return r.slice(v, Value(None{}), Value(None{}), Value(int64_t{-1}));
       List items = r.items_of(v);
       std::reverse(items.begin(), items.end());
       return r.list(std::move(items));
     }},
    {"round",
     [](Runtime& r, const Value& v, const Arguments& given) {
       return rounded(r, v, r.bind("round", given, {"precision", "method"}));
     }},
    // Marks a text as HTML; without autoescape that does not change the output.
    {"safe", on_text<[](std::string text) { return text; }>},
    {"select",
     [](Runtime& r, const Value& v, const Arguments& given) { return chosen(r, v, given, false, true); }},
    {"selectattr",
     [](Runtime& r, const Value& v, const Arguments& given) { return chosen(r, v, given, true, true); }},
    {"sort",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("sort", given, {"reverse", "case_sensitive", "attribute"});
       List items = r.items_of(v), keys;
       for (const Value& item : items)
         keys.push_back(folded(r, item_or_attribute(r, item, a[2]), a[1] && a[1]->truthy()));
       sort_items(r, items, keys, a[0] && a[0]->truthy());
       return r.list(std::move(items));
     }},
    {"string",
     [](Runtime& r, const Value& v, const Arguments&) { return v.text() ? v : r.text(text_of(r, v)); }},
    {"sum",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("sum", given, {"attribute", "start"});
       Value total = a[1] ? *a[1] : Value(int64_t{0});
       for (const Value& item : r.items_of(v)) total = r.binary("+", total, item_or_attribute(r, item, a[0]));
       return total;
     }},
    {"title", on_text<title_by_words>},
    {"tojson",
     [](Runtime& r, const Value& v, const Arguments& given) {
       // The filter of Transformers, whose first argument is ensure_ascii.
       const auto a = r.bind("tojson", given, {"ensure_ascii", "indent", "separators", "sort_keys"});
       const JsonStyle style = json_style(r, {a[1], a[2], a[0], a[3]});
       r.charge(v.weight() *
                (2 + (style.indent ? static_cast<int64_t>(style.indent->size()) * v.depth() : 0)));
       std::string out;
       if (!print_json(v, style, out))
         r.error(std::string("a ") + v.type_name() + " (or one inside of it) has no JSON form");
       return r.text(std::move(out));
     }},
    {"trim",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("trim", given, {"chars"});
       const std::string text = text_of(r, v);
       std::optional<std::string_view> characters;
       if (a[0] && !a[0]->is_none()) characters = r.words("`chars`", *a[0]);
       return r.text(std::string(stripped(text, characters, StripSide::both)));
     }},
    {"unique",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const auto a = r.bind("unique", given, {"case_sensitive", "attribute"});
       List items, keys;
       for (const Value& item : r.items_of(v)) {
         const Value key = folded(r, item_or_attribute(r, item, a[1]), a[0] && a[0]->truthy());
         if (std::any_of(keys.begin(), keys.end(), [&](const Value& seen) { return r.same(seen, key); }))
           continue;
         keys.push_back(key);
         items.push_back(item);
       }
       return r.list(std::move(items));
     }},
    {"upper", on_text<upper>},
};

constexpr Named<std::string_view> kFilterAliases[] = {{"d", "default"}};

// --- tests

using Test = bool (*)(Runtime&, const Value&, const Arguments&);
Value other_of(Runtime& r, const Arguments& given) {
  return *r.bind("this test", given, {"other"}, 1)[0];
}
const Named<Test> kTests[] = {
    {"boolean", [](Runtime&, const Value& v, const Arguments&) { return v.as<bool>() != nullptr; }},
    {"callable", [](Runtime&, const Value& v, const Arguments&) { return v.callable() != nullptr; }},
    {"defined", [](Runtime&, const Value& v, const Arguments&) { return !v.is_undefined(); }},
    {"divisibleby",
     [](Runtime& r, const Value& v, const Arguments& given) {
       return equal(r.binary("%", v, other_of(r, given)), Value(int64_t{0}));
     }},
    {"equalto",
     [](Runtime& r, const Value& v, const Arguments& given) { return r.same(v, other_of(r, given)); }},
    {"even", [](Runtime& r, const Value& v, const Arguments&) { return r.integer("`even`", v) % 2 == 0; }},
    {"false", [](Runtime&, const Value& v, const Arguments&) { return v.as<bool>() && !*v.as<bool>(); }},
    {"float", [](Runtime&, const Value& v, const Arguments&) { return v.as<double>() != nullptr; }},
    {"ge",
     [](Runtime& r, const Value& v, const Arguments& given) { return !r.before(v, other_of(r, given)); }},
    {"gt",
     [](Runtime& r, const Value& v, const Arguments& given) { return r.before(other_of(r, given), v); }},
    {"in",
     [](Runtime& r, const Value& v, const Arguments& given) { return r.contains(other_of(r, given), v); }},
    {"integer", [](Runtime&, const Value& v, const Arguments&) { return v.as<int64_t>() != nullptr; }},
    {"iterable", [](Runtime&, const Value& v,
                    const Arguments&) { return v.is_undefined() || v.text() || v.list() || v.map(); }},
    {"le",
     [](Runtime& r, const Value& v, const Arguments& given) { return !r.before(other_of(r, given), v); }},
    {"lower",
     [](Runtime& r, const Value& v, const Arguments&) {
       const std::string text = r.printed(v);
       return lower(text) == text && upper(text) != text;
     }},
    {"lt",
     [](Runtime& r, const Value& v, const Arguments& given) { return r.before(v, other_of(r, given)); }},
    {"mapping", [](Runtime&, const Value& v, const Arguments&) { return v.map() != nullptr; }},
    {"ne", [](Runtime& r, const Value& v, const Arguments& given) { return !r.same(v, other_of(r, given)); }},
    {"none", [](Runtime&, const Value& v, const Arguments&) { return v.is_none(); }},
    {"number", [](Runtime&, const Value& v, const Arguments&) { return v.is_number(); }},
    {"odd", [](Runtime& r, const Value& v, const Arguments&) { return r.integer("`odd`", v) % 2 != 0; }},
    {"sameas",
     [](Runtime& r, const Value& v, const Arguments& given) {
       const Value other = other_of(r, given);
       return std::string_view(v.type_name()) == other.type_name() && r.same(v, other);
     }},
    {"sequence", [](Runtime&, const Value& v,
                    const Arguments&) { return v.is_undefined() || v.text() || v.list() || v.map(); }},
    {"string", [](Runtime&, const Value& v, const Arguments&) { return v.text() != nullptr; }},
    {"true", [](Runtime&, const Value& v, const Arguments&) { return v.as<bool>() && *v.as<bool>(); }},
    {"undefined", [](Runtime&, const Value& v, const Arguments&) { return v.is_undefined(); }},
    {"upper",
     [](Runtime& r, const Value& v, const Arguments&) {
       const std::string text = r.printed(v);
       return upper(text) == text && lower(text) != text;
     }},
};
constexpr Named<std::string_view> kTestAliases[] = {
    {"==", "equalto"}, {"eq", "equalto"}, {"!=", "ne"},       {">", "gt"},  {"greaterthan", "gt"},
    {">=", "ge"},      {"<", "lt"},       {"lessthan", "lt"}, {"<=", "le"},
};

template <size_t N>
std::string_view real_name(const Named<std::string_view> (&aliases)[N], std::string_view name) {
  const auto alias = find_named(aliases, name);
  return alias == std::end(aliases) ? name : alias->function;
}

// --- methods

using TextMethod = Value (*)(Runtime&, const std::string&, const Arguments&);

template <StripSide side>
Value strip_method(Runtime& r, const std::string& text, const Arguments& given) {
  const auto a = r.bind("strip", given, {"chars"});
  std::optional<std::string_view> characters;
  if (a[0] && !a[0]->is_none()) characters = r.words("`strip`", *a[0]);
  return r.text(std::string(stripped(text, characters, side)));
}
template <bool from_back>
Value split_method(Runtime& r, const std::string& text, const Arguments& given) {
  const auto a = r.bind("split", given, {"sep", "maxsplit"});
  std::optional<std::string_view> separator;
  if (a[0] && !a[0]->is_none()) separator = r.words("`split`", *a[0]);
  if (separator && separator->empty()) r.error("a split at an empty text");
  r.charge(static_cast<int64_t>(text.size()) * 2);
  return texts(r, split_text(text, separator, a[1] ? r.integer("`maxsplit`", *a[1]) : -1, from_back));
}
template <auto function>
Value changed_text(Runtime& r, const std::string& text, const Arguments& given) {
  r.bind("this method", given, {});
  return r.text(function(text));
}
template <bool at_end>
Value begins_or_ends(Runtime& r, const std::string& text, const Arguments& given) {
  const auto a = r.bind(at_end ? "endswith" : "startswith", given, {"prefix"}, 1);
  const auto holds = [&](const Value& part) {
    const std::string& words = r.words(at_end ? "`endswith`" : "`startswith`", part);
    return at_end ? text.ends_with(words) : text.starts_with(words);
  };
  if (a[0]->list()) return Value(std::any_of(a[0]->list()->begin(), a[0]->list()->end(), holds));
  return Value(holds(*a[0]));
}
template <bool from_back>
Value find_method(Runtime& r, const std::string& text, const Arguments& given) {
  const auto a = r.bind("find", given, {"sub"}, 1);
  const std::string& part = r.words("`find`", *a[0]);
  r.step(static_cast<int64_t>(text.size()) / 16);
  const size_t at = from_back ? text.rfind(part) : text.find(part);
  return Value(at == std::string::npos
                   ? int64_t{-1}
                   : static_cast<int64_t>(count_code_points(std::string_view(text).substr(0, at))));
}
template <bool at_end>
Value without(Runtime& r, const std::string& text, const Arguments& given) {
  const std::string part = r.words("an affix", *r.bind("removeprefix", given, {"prefix"}, 1)[0]);
  if (at_end ? !text.ends_with(part) : !text.starts_with(part)) return r.text(text);
  return r.text(at_end ? text.substr(0, text.size() - part.size()) : text.substr(part.size()));
}
template <auto holds>
Value all_characters(Runtime& r, const std::string& text, const Arguments&) {
  r.step(static_cast<int64_t>(text.size()) / 64);
  return Value(!text.empty() && std::all_of(text.begin(), text.end(), holds));
}

const Named<TextMethod> kTextMethods[] = {
    {"capitalize", changed_text<capitalized>},
    {"count",
     [](Runtime& r, const std::string& text, const Arguments& given) {
       const std::string& part = r.words("`count`", *r.bind("count", given, {"sub"}, 1)[0]);
       r.step(static_cast<int64_t>(text.size()) / 16);
       if (part.empty()) return Value(static_cast<int64_t>(count_code_points(text)) + 1);
       int64_t count = 0;
       for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
         ++count;
       return Value(count);
     }},
    {"endswith", begins_or_ends<true>},
    {"find", find_method<false>},
    {"isdigit",
     all_characters<[](char c) { return std::string_view("0123456789").find(c) != std::string_view::npos; }>},
    {"isspace", all_characters<[](char c) { return blank_at(std::string_view(&c, 1), 0) != 0; }>},
    {"join",
     [](Runtime& r, const std::string& text, const Arguments& given) {
       const auto a = r.bind("join", given, {"iterable"}, 1);
       for (const Value& item : r.items_of(*a[0])) r.words("`join`", item);
       return apply_filter(r, "join", *a[0], {{Value(text)}, {}});
     }},
    {"lower", changed_text<lower>},
    {"lstrip", strip_method<StripSide::front>},
    {"removeprefix", without<false>},
    {"removesuffix", without<true>},
    {"replace",
     [](Runtime& r, const std::string& text, const Arguments& given) {
       return replaced_text(r, text, r.bind("replace", given, {"old", "new", "count"}, 2));
     }},
    {"rfind", find_method<true>},
    {"rsplit", split_method<true>},
    {"rstrip", strip_method<StripSide::back>},
    {"split", split_method<false>},
    {"splitlines",
     [](Runtime& r, const std::string& text, const Arguments& given) {
       r.bind("splitlines", given, {});
       r.charge(static_cast<int64_t>(text.size()) * 2);
       return texts(r, split_lines(text));
     }},
    {"startswith", begins_or_ends<false>},
    {"strip", strip_method<StripSide::both>},
    {"title", changed_text<title_by_letters>},
    {"upper", changed_text<upper>},
};

constexpr std::array<std::string_view, 4> kMapMethods = {"get", "items", "keys", "values"};
constexpr std::array<std::string_view, 2> kListMethods = {"count", "index"};

Value map_method(Runtime& r, const Value& self, std::string_view name, const Arguments& given) {
  const Map& map = *self.map();
  if (name == "get") {
    const auto a = r.bind(name, given, {"key", "default"}, 1);
    const Value* found = a[0]->text() ? map.find(*a[0]->text()) : nullptr;
    return found ? *found : a[1] ? *a[1] : Value(None{});
  }
  r.bind(name, given, {});
  if (name == "items") return apply_filter(r, "items", self, {});
  List items;
  for (const auto& item : map.items()) items.push_back(name == "keys" ? r.text(item.first) : item.second);
  return r.list(std::move(items));
}

Value list_method(Runtime& r, const Value& self, std::string_view name, const Arguments& given) {
  const Value wanted = *r.bind(name, given, {"value"}, 1)[0];
  int64_t count = 0;
  for (size_t i = 0; i < self.list()->size(); ++i) {
    if (!r.same((*self.list())[i], wanted)) continue;
    if (name == "index") return Value(static_cast<int64_t>(i));
    ++count;
  }
  if (name == "index") r.error("the list does not hold this value");
  return Value(count);
}

// --- global functions

constexpr std::array<std::string_view, 5> kFunctions = {"dict", "namespace", "raise_exception", "range",
                                                        "strftime_now"};

Value named_values(Runtime& r, const Arguments& given) {
  if (given.positional.size() > 1) r.error("at most one argument without a name");
  Map map;
  if (!given.positional.empty()) {
    if (!given.positional[0].map()) r.error("expected a dict");
    for (const auto& item : given.positional[0].map()->items()) map.set(item.first, item.second);
  }
  for (const auto& [name, value] : given.named) map.set(name, value);
  return r.map(std::move(map));
}

Value range_of(Runtime& r, const Arguments& given) {
  // The limit of Jinja2's sandbox.
  constexpr int64_t kMaxRangeItems = 100'000;
  const auto a = r.bind("range", given, {"start", "stop", "step"}, 1);
  const int64_t first = r.integer("`range`", *a[0]), by = a[2] ? r.integer("`range`", *a[2]) : 1;
  int64_t at = a[1] ? first : 0;
  const int64_t end = a[1] ? r.integer("`range`", *a[1]) : first;
  if (by == 0) r.error("a range with step 0");
  List items;
  while (by > 0 ? at < end : at > end) {
    if (static_cast<int64_t>(items.size()) == kMaxRangeItems)
      r.error("a range of more than " + with_separators(kMaxRangeItems) + " items");
    items.push_back(Value(at));
    if (__builtin_add_overflow(at, by, &at)) break;
  }
  return r.list(std::move(items));
}

}  // namespace

Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments) {
  const auto found = find_named(kFilters, real_name(kFilterAliases, name));
  if (found == std::end(kFilters)) no_such(runtime, "filter", name, kFilters);
  // `map` takes the name of a filter, which may be `map` again.
  constexpr int kMaxInside = 8;
  if (runtime.filters_inside >= kMaxInside) runtime.error("filters inside of filters");
  ++runtime.filters_inside;
  Value result = found->function(runtime, value, arguments);
  --runtime.filters_inside;
  return result;
}

bool apply_test(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments) {
  const auto found = find_named(kTests, real_name(kTestAliases, name));
  if (found == std::end(kTests)) no_such(runtime, "test", name, kTests);
  return found->function(runtime, value, arguments);
}

bool has_method(const Value& self, std::string_view name) {
  const auto in = [&](const auto& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (self.text()) return find_named(kTextMethods, name) != std::end(kTextMethods);
  return self.map() ? in(kMapMethods) : self.list() && in(kListMethods);
}

Value call_method(Runtime& runtime, const Value& self, std::string_view name, const Arguments& arguments) {
  if (self.text()) return find_named(kTextMethods, name)->function(runtime, *self.text(), arguments);
  return self.map() ? map_method(runtime, self, name, arguments)
                    : list_method(runtime, self, name, arguments);
}

std::optional<Value> find_function(const Runtime& runtime, std::string_view name) {
  if (std::find(kFunctions.begin(), kFunctions.end(), name) == kFunctions.end()) return std::nullopt;
  if (name == "strftime_now" && !runtime.now()) return std::nullopt;
  auto node = std::make_shared<CallableNode>();
  node->name = name;
  return Value(std::shared_ptr<const CallableNode>(std::move(node)));
}

Value call_function(Runtime& runtime, std::string_view name, const Arguments& arguments) {
  if (name == "range") return range_of(runtime, arguments);
  if (name == "dict") return named_values(runtime, arguments);
  if (name == "namespace") {
    auto node = std::make_shared<NamespaceNode>();
    node->attributes = *named_values(runtime, arguments).map();
    return Value(std::move(node));
  }
  if (name == "raise_exception") {
    const auto a = runtime.bind(name, arguments, {"message"}, 1);
    runtime.error("the template refuses the conversation: " + runtime.printed(*a[0]));
  }
  const auto a = runtime.bind(name, arguments, {"format"}, 1);
  char text[256];
  const size_t size =
      std::strftime(text, sizeof text, runtime.words("`strftime_now`", *a[0]).c_str(), &*runtime.now());
  return runtime.text(std::string(text, size));
}

}  // namespace capstan::text::chat
