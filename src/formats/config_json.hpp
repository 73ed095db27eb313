// Reads a config.json key by key. Every key must be read by the model family, be known to have no effect, or
// be off (null, false, empty); finish() reports all other keys at once.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"

namespace capstan::formats {

class ConfigJson {
 public:
  // object: must outlive the reader. location: its name in messages, "DIR/config.json" or a path inside it.
  ConfigJson(const Json& object, std::string location);

  const std::string& location() const { return location_; }
  // Whether the key is present and not null.
  bool has(const char* key) const;
  bool missing(const char* key) const { return !object_.contains(key); }
  // The following functions mark the key as read and throw ErrorCode::format for a value of another type.
  // They return `otherwise` if the key is missing or null.

  // An integer in [1, most].
  int64_t integer(const char* key, std::optional<int64_t> otherwise = {}, int64_t most = 1 << 30);
  // A finite number.
  double number(const char* key, std::optional<double> otherwise = {});
  bool boolean(const char* key, bool otherwise);
  std::string text(const char* key, std::optional<std::string> otherwise = {});
  std::vector<double> numbers(const char* key);
  std::vector<std::string> texts(const char* key);
  // The value, or null if the key is missing. Marks the key as read.
  const Json& value(const char* key);
  // Requires this value where the key is present; Capstan does not support the computation of any other
  // value.
  void only(const char* key, const Json& value, const std::string& why);
  void changes_nothing(std::initializer_list<const char*> keys);

  // Collects a problem that finish() throws.
  void refuse(const std::string& problem);
  // Throws ErrorCode::unsupported with all refusals and all keys that were not read.
  void finish();

 private:
  // Marks the key as read. Refuses a missing one unless it is optional.
  std::optional<JsonView> find(const char* key, bool optional = true);

  const Json& object_;
  std::string location_;
  std::set<std::string, std::less<>> read_;
  std::vector<std::string> problems_;
};

}  // namespace capstan::formats
