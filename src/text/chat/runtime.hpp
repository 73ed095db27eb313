// The state of a running template: its budget, its current location, and helpers that filters, tests, methods
// and functions share.
#pragma once

#include <ctime>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat/source.hpp"
#include "text/chat/value.hpp"

namespace capstan::text::chat {

// Resource limits of a template, which is untrusted and runs on untrusted data. One step is an expression, a
// statement, an iteration of a loop, or some hundred bytes of text that are processed.
struct Limits {
  int64_t steps = 20'000'000;
  int64_t bytes = int64_t{512} << 20;   // of texts and lists made, all together
  int64_t output = int64_t{256} << 20;  // of the text that it prints
  // Of statements and expressions inside one another, macros included.
  int depth = 400;
};

struct Arguments {
  List positional;
  std::vector<std::pair<std::string, Value>> named;
};

class Runtime {
 public:
  Runtime(const Source& source, const Limits& limits, std::optional<std::tm> now)
      : source_(source), limits_(limits), now_(now) {}

  // Offset of the expression or statement that runs; errors name it.
  size_t at = 0;
  int filters_inside = 0;
  [[noreturn]] void error(const std::string& what, std::string help = {}) const {
    source_.fail_at(at, what, ErrorCode::format, std::move(help));
  }
  [[noreturn]] void unsupported(const std::string& what) const;

  void step(int64_t count = 1) {
    if (count > limits_.steps - steps_) out_of("steps", limits_.steps);
    steps_ += count;
  }
  void charge(int64_t bytes) {
    if (bytes > limits_.bytes - bytes_) out_of("bytes of texts and lists", limits_.bytes);
    bytes_ += bytes;
    step(bytes / 128);
  }
  const Limits& limits() const { return limits_; }
  const std::optional<std::tm>& now() const { return now_; }
  [[noreturn]] void out_of(const char* what, int64_t limit) const;

  Value text(std::string text) {
    charge(static_cast<int64_t>(text.size()));
    return Value(std::move(text));
  }
  Value list(List items, bool tuple = false);
  Value map(Map map);
  std::string printed(const Value& value);  // "" for undefined
  bool same(const Value& a, const Value& b) {
    step(1 + std::min(a.weight(), b.weight()) / 64);
    return equal(a, b);
  }
  bool before(const Value& a, const Value& b);  // a < b; an error where there is no order

  // Python's iteration: items, keys of a map, characters of a text; nothing for an undefined value.
  List items_of(const Value& value);
  Value attribute(const Value& base, std::string_view name);  // base.name
  Value subscript(const Value& base, const Value& key);       // base[key]
  Value slice(const Value& base, const Value& from, const Value& to, const Value& step);
  bool contains(const Value& container, const Value& item);
  Value binary(std::string_view op, const Value& a, const Value& b);

  // Arguments in the order of `names`; missing ones are nullopt. An error for one too many, or with another
  // name.
  std::vector<std::optional<Value>> bind(std::string_view what, const Arguments& given,
                                         std::initializer_list<std::string_view> names,
                                         size_t required = 0) const;
  // An argument that has to be an integer or a text.
  int64_t integer(std::string_view what, const Value& value) const;
  const std::string& words(std::string_view what, const Value& value) const;

 private:
  const Source& source_;
  Limits limits_;
  std::optional<std::tm> now_;
  int64_t steps_ = 0, bytes_ = 0;
};

// By name; an error that names what there is when there is none of that name.
Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);
bool apply_test(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);
Value call_method(Runtime& runtime, const Value& self, std::string_view name, const Arguments& arguments);
bool has_method(const Value& self, std::string_view name);
// Global functions: range, namespace, dict, raise_exception, strftime_now.
Value call_function(Runtime& runtime, std::string_view name, const Arguments& arguments);
std::optional<Value> find_function(const Runtime& runtime, std::string_view name);

}  // namespace capstan::text::chat
