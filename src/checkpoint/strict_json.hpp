// JSON from untrusted files: bounded depth, no duplicate keys, exact integers, every error with its path.
// Included only by .cpp files (nlohmann/json is heavy).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace capstan::checkpoint {

// Throws ErrorCode::format with `file` and the offset.
nlohmann::json parse_strict_json(std::string_view text, const std::string& file, int max_depth = 64);

// A value with its path. Accessors throw ErrorCode::format naming file, path and the expected type.
class JsonView {
 public:
  JsonView(const nlohmann::json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  JsonView at(const char* key) const;
  JsonView item(const std::string& key, const nlohmann::json& value) const {
    return {value, file_, path_ + "." + key};
  }
  JsonView item(size_t index, const nlohmann::json& value) const {
    return {value, file_, path_ + "[" + std::to_string(index) + "]"};
  }
  const nlohmann::json& object() const;
  const nlohmann::json& array() const;
  const std::string& string() const;
  int64_t count() const;                                          // an integer in [0, 2^63)
  void only(std::initializer_list<std::string_view> keys) const;  // refuses other keys
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  const nlohmann::json* value_;
  std::string file_, path_;
};

}  // namespace capstan::checkpoint
