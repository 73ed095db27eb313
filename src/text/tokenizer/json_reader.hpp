// An untrusted JSON file, parsed by simdjson within limits. Every error names the file and the location.
// Private to the loaders, because it includes simdjson.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace capstan::text {

class JsonFile {
 public:
  static constexpr uint64_t kMaxBytes = uint64_t{64} << 20;
  static constexpr size_t kMaxDepth = 64;

  // Throws ErrorCode::format with file:line:column when the text is not JSON.
  JsonFile(std::string text, std::string name);
  simdjson::dom::element root() const { return root_; }
  const std::string& name() const { return name_; }

  // "NAME: PATH: what"
  [[noreturn]] void fail_at(std::string_view path, std::string_view what,
                            ErrorCode code = ErrorCode::format) const;

  simdjson::dom::object object(simdjson::dom::element value,
                               std::string_view path) const;  // refuses duplicate keys
  simdjson::dom::array array(simdjson::dom::element value, std::string_view path) const;
  std::string_view text(simdjson::dom::element value, std::string_view path) const;
  bool boolean(simdjson::dom::element value, std::string_view path) const;
  int64_t integer(simdjson::dom::element value, std::string_view path) const;

  // The object and its "type".
  std::pair<simdjson::dom::object, std::string_view> typed(simdjson::dom::element value,
                                                           std::string_view path) const;
  // "NAME: PATH: the KIND "TYPE" is not supported", with what is.
  [[noreturn]] void fail_unknown(std::string_view path, std::string_view kind, std::string_view type,
                                 std::string_view known) const;
  // A token's id: 0 … 2^31-2.
  int32_t token_id(simdjson::dom::element value, std::string_view path) const;

  // A member, nullopt when it is absent or null.
  std::optional<simdjson::dom::element> member(simdjson::dom::object object, std::string_view key) const;
  std::string_view text_or(simdjson::dom::object object, std::string_view path, std::string_view key,
                           std::string_view otherwise) const;
  // The member must be there.
  simdjson::dom::element needed(simdjson::dom::object object, std::string_view path,
                                std::string_view key) const;
  bool boolean_or(simdjson::dom::object object, std::string_view path, std::string_view key,
                  bool otherwise) const;

 private:
  std::string text_, name_;
  simdjson::dom::parser parser_;
  simdjson::dom::element root_;
};

// Paths inside a file, for messages: "model.vocab", "added_tokens[3]".
std::string child(std::string_view path, std::string_view key);
std::string child(std::string_view path, size_t index);

std::string_view json_type_name(simdjson::dom::element value);

}  // namespace capstan::text
