// An untrusted JSON file of a tokenizer, parsed by simdjson within limits, since these files have megabytes
// and are read at every start. Every error names the file and the location. Private to the loaders, because
// it includes simdjson.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace capstan::text {

class JsonNode;

class JsonFile {
 public:
  static constexpr uint64_t kMaxBytes = uint64_t{64} << 20;
  static constexpr size_t kMaxDepth = 64;

  // Throws ErrorCode::format with file:line:column when the text is not JSON.
  JsonFile(std::string text, std::string name);
  JsonNode root() const;
  const std::string& name() const { return name_; }

 private:
  std::string text_, name_;
  simdjson::dom::parser parser_;
  simdjson::dom::element root_;
};

// A value in a JsonFile, which outlives it, with its path: "model.vocab", "added_tokens[3]". An accessor
// throws ErrorCode::format if the value has another type.
class JsonNode {
 public:
  JsonNode(const JsonFile& file, simdjson::dom::element value, std::string path)
      : file_(&file), value_(value), path_(std::move(path)) {}

  simdjson::dom::element value() const { return value_; }
  // "NAME: PATH", NAME for the root.
  std::string location() const;

  // The value as an object; refuses duplicate keys.
  simdjson::dom::object object() const;
  // The value as an object, without the check for duplicate keys.
  simdjson::dom::object map() const;
  simdjson::dom::array array() const;
  // The elements of an array.
  std::vector<JsonNode> items() const;
  std::string_view text() const;
  bool boolean() const;
  int64_t integer() const;
  // The value as a token id, 0 … 2^31-2.
  int32_t token_id() const;

  // A member of an object, nullopt where it is absent or null.
  std::optional<JsonNode> find(std::string_view key) const;
  // A member of an object; throws ErrorCode::format where it is absent or null.
  JsonNode at(std::string_view key) const;
  std::string_view text(std::string_view key, std::string_view otherwise) const;
  bool boolean(std::string_view key, bool otherwise) const;
  // The type of a step, which is an object with "type".
  std::string_view type() const;

  JsonNode item(size_t index, simdjson::dom::element value) const;
  // A child node with the path PATH.key.
  JsonNode member(std::string_view key, simdjson::dom::element value) const;
  // A child node with the path PATH["key"].
  JsonNode entry(std::string_view key, simdjson::dom::element value) const;

  // Throws the message "NAME: PATH: what".
  [[noreturn]] void fail(std::string_view what, ErrorCode code = ErrorCode::format) const;
  // Throws the message "NAME: PATH: the KIND "TYPE" is not supported", with the list of supported ones.
  [[noreturn]] void fail_unknown(std::string_view kind, std::string_view type, std::string_view known) const;
  [[noreturn]] void fail_type(std::string_view expected) const;

 private:
  const JsonFile* file_;
  simdjson::dom::element value_;
  std::string path_;
};

}  // namespace capstan::text
