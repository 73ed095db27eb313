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

// A value in a JsonFile, which outlives it, with its path: "model.vocab", "added_tokens[3]". A value of
// another type than asked for is ErrorCode::format.
class JsonNode {
 public:
  JsonNode(const JsonFile& file, simdjson::dom::element value, std::string path)
      : file_(&file), value_(value), path_(std::move(path)) {}

  simdjson::dom::element value() const { return value_; }
  std::string location() const;  // "NAME: PATH", NAME for the root

  simdjson::dom::object object() const;  // refuses duplicate keys
  simdjson::dom::object map() const;     // does not look for duplicate keys
  simdjson::dom::array array() const;
  std::vector<JsonNode> items() const;  // of an array
  std::string_view text() const;
  bool boolean() const;
  int64_t integer() const;
  int32_t token_id() const;  // 0 … 2^31-2

  // A member of an object, nullopt where it is absent or null.
  std::optional<JsonNode> find(std::string_view key) const;
  JsonNode at(std::string_view key) const;  // must be there
  std::string_view text(std::string_view key, std::string_view otherwise) const;
  bool boolean(std::string_view key, bool otherwise) const;
  std::string_view type() const;  // of a step: an object with "type"

  JsonNode item(size_t index, simdjson::dom::element value) const;
  JsonNode member(std::string_view key, simdjson::dom::element value) const;  // PATH.key
  JsonNode entry(std::string_view key, simdjson::dom::element value) const;   // PATH["key"]

  // "NAME: PATH: what"
  [[noreturn]] void fail(std::string_view what, ErrorCode code = ErrorCode::format) const;
  // "NAME: PATH: the KIND "TYPE" is not supported", with what is.
  [[noreturn]] void fail_unknown(std::string_view kind, std::string_view type, std::string_view known) const;
  [[noreturn]] void fail_type(std::string_view expected) const;

 private:
  const JsonFile* file_;
  simdjson::dom::element value_;
  std::string path_;
};

}  // namespace capstan::text
