// JSON: strict parsing of untrusted files, a reader whose errors name file and key, and writing. The only
// header of src that includes nlohmann/json, which is heavy: include it from .cpp files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

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

// A value with its path. Accessors throw ErrorCode::format naming file, path and the expected type.
class JsonView {
 public:
  JsonView(const Json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  JsonView at(const char* key) const;
  JsonView item(const std::string& key, const Json& value) const { return {value, file_, path_ + "." + key}; }
  JsonView item(size_t index, const Json& value) const {
    return {value, file_, path_ + "[" + std::to_string(index) + "]"};
  }
  const Json& object() const;
  const Json& array() const;
  const std::string& string() const;
  // An integer in [0, 2^63).
  int64_t count() const;
  // Refuses keys other than these.
  void only(std::initializer_list<std::string_view> keys) const;
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  const Json* value_;
  std::string file_, path_;
};

}  // namespace capstan
