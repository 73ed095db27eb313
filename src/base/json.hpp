// JSON: strict parsing of untrusted files, a reader whose errors name file and key, and writing. The only
// header of src that includes nlohmann/json, which is heavy: include it from .cpp files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace capstan {

using Json = nlohmann::json;
// Keys in the order in which they were added.
using OrderedJson = nlohmann::ordered_json;

// Refuses duplicate keys and deeper nesting than `max_depth`. Throws ErrorCode::format that begins with
// `file:line:column` where the text is not JSON, and with `file` where it breaks one of the two rules.
Json parse_json(std::string_view text, const std::string& file, int max_depth = 64);

// Parses a text without the rules and messages of parse_json: for texts that Capstan writes, and for texts
// that need not be JSON. raise: throws Json::parse_error. discard: returns a value for which is_discarded()
// is true. These are functions because every file that calls Json::parse or dump itself compiles a parser or
// a writer, which takes two seconds.
enum class IfNotJson { raise, discard };
Json json_of(std::string_view text, IfNotJson = IfNotJson::raise);
OrderedJson ordered_json_of(std::string_view text, IfNotJson = IfNotJson::raise);

// Writes a value as text. `indent` is the number of blanks for each level; -1 writes one line. Bytes that are
// not UTF-8 become U+FFFD, and numbers that are not finite become null.
std::string dump_json(const Json& value, int indent = -1);
std::string dump_json(const OrderedJson& value, int indent = -1);

// The value, or null without one.
template <class T>
OrderedJson or_null(const std::optional<T>& value) {
  return value ? OrderedJson(*value) : OrderedJson();
}

// Finds where and why a text is not JSON, for readers whose faster parser gives no offsets. Returns nullopt
// if the text is JSON.
struct JsonProblem {
  size_t offset;
  std::string reason;
};
std::optional<JsonProblem> find_json_problem(std::string_view text);
// The message of a parse error without the library's tag and position.
std::string json_reason(const Json::exception& error);

// Formats a value on one line of at most 60 bytes, for messages.
std::string json_excerpt(const Json& value);

// A value with its path. Accessors throw ErrorCode::format naming file, path, the expected type and the
// value.
class JsonView {
 public:
  JsonView(const Json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  JsonView at(const char* key) const;
  JsonView item(const std::string& key, const Json& value) const { return {value, file_, path_ + "." + key}; }
  const Json& object() const;
  const Json& array() const;
  // The items of an array.
  std::vector<JsonView> items() const;
  const std::string& string() const;
  bool boolean() const;
  // A finite number.
  double number() const;
  int64_t integer(int64_t least, int64_t most) const;
  // An integer in [0, 2^63).
  int64_t count() const;
  // Throws if the object has keys other than these.
  void only(std::initializer_list<std::string_view> keys) const;
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  void require(bool is, std::string_view expected) const;

  const Json* value_;
  std::string file_, path_;
};

}  // namespace capstan
