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
using OrderedJson = nlohmann::ordered_json;  // keys in the order in which they were added

// Refuses duplicate keys and deeper nesting than `max_depth`. Throws ErrorCode::format that begins with
// `file:line:column` where the text is not JSON, and with `file` where it breaks one of the two rules.
Json parse_json(std::string_view text, const std::string& file, int max_depth = 64);

// indent: blanks for each level; -1 for one line. Bytes that are not UTF-8 become U+FFFD, and numbers that
// are not finite become null.
std::string dump_json(const Json& value, int indent = -1);
std::string dump_json(const OrderedJson& value, int indent = -1);

// Where and why a text is not JSON; nullopt for JSON. For readers that use a faster parser without places.
struct JsonProblem {
  size_t offset;
  std::string reason;
};
std::optional<JsonProblem> find_json_problem(std::string_view text);
// The message of a parse error without the library's tag and place.
std::string json_reason(const Json::exception& error);

// The value in one line of at most 60 bytes, for messages.
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
  std::vector<JsonView> items() const;  // of an array
  const std::string& string() const;
  bool boolean() const;
  double number() const;  // finite
  int64_t integer(int64_t least, int64_t most) const;
  int64_t count() const;  // an integer in [0, 2^63)
  // Refuses keys other than these.
  void only(std::initializer_list<std::string_view> keys) const;
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  void require(bool is, std::string_view expected) const;

  const Json* value_;
  std::string file_, path_;
};

}  // namespace capstan
