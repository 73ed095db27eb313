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
  // Bytes of all texts and lists that the template creates.
  int64_t bytes = int64_t{512} << 20;
  // Bytes of the text that the template prints.
  int64_t output = int64_t{256} << 20;
  // Nesting of statements and expressions, macros included.
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
  // The output of `{{ value }}`; empty for an undefined value.
  std::string printed(const Value& value);
  bool same(const Value& a, const Value& b) {
    step(1 + std::min(a.weight(), b.weight()) / 64);
    return equal(a, b);
  }
  // Returns a < b. Throws where the two values have no order.
  bool before(const Value& a, const Value& b);

  // Python's iteration: items, keys of a map, characters of a text; nothing for an undefined value.
  List items_of(const Value& value);
  // Evaluates `base.name`.
  Value attribute(const Value& base, std::string_view name);
  // Evaluates `base[key]`.
  Value subscript(const Value& base, const Value& key);
  Value slice(const Value& base, const Value& from, const Value& to, const Value& step);
  bool contains(const Value& container, const Value& item);
  Value binary(std::string_view op, const Value& a, const Value& b);

  // Returns the arguments in the order of `names`; missing ones are nullopt. Throws for a surplus argument or
  // one with another name.
  std::vector<std::optional<Value>> bind(std::string_view what, const Arguments& given,
                                         std::initializer_list<std::string_view> names,
                                         size_t required = 0) const;
  // Returns an argument that must be an integer, or a text; throws for any other type.
  int64_t integer(std::string_view what, const Value& value) const;
  const std::string& words(std::string_view what, const Value& value) const;

 private:
  const Source& source_;
  Limits limits_;
  std::optional<std::tm> now_;
  int64_t steps_ = 0, bytes_ = 0;
};

// Applies the filter `name`; throws an error that lists the filters if there is none of that name.
Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);
bool apply_test(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);
Value call_method(Runtime& runtime, const Value& self, std::string_view name, const Arguments& arguments);
bool has_method(const Value& self, std::string_view name);
// Calls a global function: range, namespace, dict, raise_exception or strftime_now.
Value call_function(Runtime& runtime, std::string_view name, const Arguments& arguments);
std::optional<Value> find_function(const Runtime& runtime, std::string_view name);

}  // namespace capstan::text::chat
