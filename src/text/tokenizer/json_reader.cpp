#include "text/tokenizer/json_reader.hpp"

#include <algorithm>
#include <vector>

#include "base/json.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::text {

namespace {

// Returns `text` with ".0" appended to integers of more than 64 bits, which simdjson refuses. JSON allows
// them, and a tokenizer_config.json without a length contains one (model_max_length 1e30).
std::string with_wide_integers(std::string_view text) {
  std::string result;
  bool quoted = false;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    size_t end = i + 1;
    if (quoted) {
      if (c == '\\') ++end;
      quoted = c != '"';
    } else if (c == '"') {
      quoted = true;
    } else if (std::string_view("-+.0123456789eE").find(c) != std::string_view::npos) {
      end = std::min(text.find_first_not_of("-+.0123456789eE", i), text.size());
    }
    const std::string_view number = text.substr(i, end - i);
    result += number;
    if (number.size() > 18 && number.find_first_of(".eE") == std::string_view::npos) result += ".0";
    i = end;
  }
  return result;
}

}  // namespace

JsonFile::JsonFile(std::string text, std::string name) : text_(std::move(text)), name_(std::move(name)) {
  if (text_.size() > kMaxBytes)
    fail(ErrorCode::format, name_ + " has " + std::to_string(text_.size()) + " bytes; the limit is " +
                                std::to_string(kMaxBytes));
  if (text_.find_first_not_of(" \t\r\n") == std::string::npos) fail(ErrorCode::format, name_ + " is empty");
  text_.reserve(text_.size() + simdjson::SIMDJSON_PADDING);
  auto error = parser_.allocate(text_.size(), kMaxDepth);
  if (!error) error = parser_.parse(text_.data(), text_.size(), false).get(root_);
  if (error == simdjson::NUMBER_ERROR) {
    text_ = with_wide_integers(text_);
    text_.reserve(text_.size() + simdjson::SIMDJSON_PADDING);
    error = parser_.allocate(text_.size(), kMaxDepth);
    if (!error) error = parser_.parse(text_.data(), text_.size(), false).get(root_);
  }
  if (!error) return;
  if (error == simdjson::MEMALLOC) throw std::bad_alloc();
  if (error == simdjson::DEPTH_ERROR)
    fail(ErrorCode::format,
         name_ + ": objects and arrays are nested more than " + std::to_string(kMaxDepth) + " deep");
  if (const auto invalid = first_invalid_utf8(text_))
    fail(ErrorCode::format, name_ + ":" + line_and_column(text_, *invalid) + ": invalid UTF-8 at byte " +
                                std::to_string(*invalid));
  const auto problem = find_json_problem(text_);
  if (!problem) fail(ErrorCode::format, name_ + ": " + simdjson::error_message(error));
  fail(ErrorCode::format, name_ + ":" + line_and_column(text_, problem->offset) + ": " + problem->reason);
}

JsonNode JsonFile::root() const {
  return {*this, root_, ""};
}

std::string JsonNode::location() const {
  return file_->name() + (path_.empty() ? "" : ": " + path_);
}

void JsonNode::fail(std::string_view what, ErrorCode code) const {
  capstan::fail(code, location() + ": " + std::string(what));
}

void JsonNode::fail_unknown(std::string_view kind, std::string_view type, std::string_view known) const {
  capstan::fail(ErrorCode::unsupported,
                location() + ": the " + std::string(kind) + " " + in_quotes(type) + " is not supported",
                "supported here: " + std::string(known));
}

static std::string_view type_name(simdjson::dom::element_type type) {
  using simdjson::dom::element_type;
  switch (type) {
    case element_type::ARRAY:
      return "an array";
    case element_type::OBJECT:
      return "an object";
    case element_type::INT64:
    case element_type::UINT64:
      return "an integer";
    case element_type::DOUBLE:
      return "a fraction";
    case element_type::STRING:
      return "a string";
    case element_type::BOOL:
      return "a boolean";
    default:
      return "null";
  }
}

void JsonNode::fail_type(std::string_view expected) const {
  fail("expected " + std::string(expected) + ", got " + std::string(type_name(value_.type())));
}

simdjson::dom::object JsonNode::map() const {
  simdjson::dom::object result;
  if (value_.get(result)) fail_type("an object");
  return result;
}
simdjson::dom::object JsonNode::object() const {
  const auto result = map();
  std::vector<std::string_view> keys;
  for (const auto field : result) keys.push_back(field.key);
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) fail("duplicate key " + in_quotes(*twice));
  return result;
}
simdjson::dom::array JsonNode::array() const {
  simdjson::dom::array result;
  if (value_.get(result)) fail_type("an array");
  return result;
}
std::vector<JsonNode> JsonNode::items() const {
  std::vector<JsonNode> result;
  for (const auto value : array()) result.push_back(item(result.size(), value));
  return result;
}
std::string_view JsonNode::text() const {
  std::string_view result;
  if (value_.get(result)) fail_type("a string");
  return result;
}
bool JsonNode::boolean() const {
  bool result = false;
  if (value_.get(result)) fail_type("a boolean");
  return result;
}
int64_t JsonNode::integer() const {
  if (value_.is_uint64() && !value_.is_int64()) fail("the number is out of range");
  int64_t result = 0;
  if (value_.get(result)) fail_type("an integer");
  return result;
}
int32_t JsonNode::token_id() const {
  const int64_t id = integer();
  if (id < 0 || id > INT32_MAX - 1) fail("the id " + std::to_string(id) + " is out of range");
  return static_cast<int32_t>(id);
}

JsonNode JsonNode::item(size_t index, simdjson::dom::element value) const {
  return {*file_, value, path_ + "[" + std::to_string(index) + "]"};
}
JsonNode JsonNode::member(std::string_view key, simdjson::dom::element value) const {
  return {*file_, value, path_ + (path_.empty() ? "" : ".") + std::string(key)};
}

JsonNode JsonNode::entry(std::string_view key, simdjson::dom::element value) const {
  return {*file_, value, path_ + "[" + in_quotes(key) + "]"};
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  simdjson::dom::element value;
  if (value_.at_key(key).get(value) || value.is_null()) return std::nullopt;
  return member(key, value);
}
JsonNode JsonNode::at(std::string_view key) const {
  auto result = find(key);
  if (!result) fail("there is no `" + std::string(key) + "`");
  return *std::move(result);
}
std::string_view JsonNode::text(std::string_view key, std::string_view otherwise) const {
  const auto node = find(key);
  return node ? node->text() : otherwise;
}
bool JsonNode::boolean(std::string_view key, bool otherwise) const {
  const auto node = find(key);
  return node ? node->boolean() : otherwise;
}
std::string_view JsonNode::type() const {
  object();
  return at("type").text();
}

}  // namespace capstan::text
