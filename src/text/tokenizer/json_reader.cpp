#include "text/tokenizer/json_reader.hpp"

#include <algorithm>
#include <vector>

#include "base/json.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::text {

namespace {

// Walks the text with the other parser, which knows where it stopped.
struct Locator : Json::json_sax_t {
  size_t position = 0;
  std::string reason;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t at, const std::string&, const Json::exception& error) override {
    position = at > 0 ? at - 1 : 0;
    reason = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while …": only the last
    // part is news.
    if (const size_t colon = reason.find(": "); colon != std::string::npos) reason.erase(0, colon + 2);
    return false;
  }
};

std::string place(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return std::to_string(line) + ":" + std::to_string(1 + count_code_points(before.substr(start)));
}

// The parser refuses integers of more than 64 bits, which JSON allows and a tokenizer_config.json has where
// no length is set (model_max_length 1e30): as fractions they are read. `text` with ".0" behind them.
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
    fail(ErrorCode::format,
         name_ + ":" + place(text_, *invalid) + ": invalid UTF-8 at byte " + std::to_string(*invalid));
  Locator locator;
  Json::sax_parse(text_, &locator, Json::input_format_t::json, true);
  if (locator.reason.empty()) fail(ErrorCode::format, name_ + ": " + simdjson::error_message(error));
  fail(ErrorCode::format, name_ + ":" + place(text_, locator.position) + ": " + locator.reason);
}

void JsonFile::fail_at(std::string_view path, std::string_view what, ErrorCode code) const {
  fail(code, name_ + ": " + (path.empty() ? "" : std::string(path) + ": ") + std::string(what));
}

std::string_view json_type_name(simdjson::dom::element value) {
  using simdjson::dom::element_type;
  switch (value.type()) {
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
    case element_type::NULL_VALUE:
      return "null";
  }
  return "something else";
}

static std::string expected(std::string_view what, simdjson::dom::element got) {
  return "expected " + std::string(what) + ", got " + std::string(json_type_name(got));
}

simdjson::dom::object JsonFile::object(simdjson::dom::element value, std::string_view path) const {
  simdjson::dom::object result;
  if (value.get(result)) fail_at(path, expected("an object", value));
  std::vector<std::string_view> keys;
  for (const auto field : result) keys.push_back(field.key);
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) fail_at(path, "the key " + quoted(*twice) + " is there twice");
  return result;
}
simdjson::dom::array JsonFile::array(simdjson::dom::element value, std::string_view path) const {
  simdjson::dom::array result;
  if (value.get(result)) fail_at(path, expected("an array", value));
  return result;
}
std::string_view JsonFile::text(simdjson::dom::element value, std::string_view path) const {
  std::string_view result;
  if (value.get(result)) fail_at(path, expected("a string", value));
  return result;
}
bool JsonFile::boolean(simdjson::dom::element value, std::string_view path) const {
  bool result = false;
  if (value.get(result)) fail_at(path, expected("a boolean", value));
  return result;
}
int64_t JsonFile::integer(simdjson::dom::element value, std::string_view path) const {
  int64_t result = 0;
  if (!value.is_int64())
    fail_at(path, value.is_uint64() ? "the number is out of range" : expected("an integer", value));
  if (value.get(result)) fail_at(path, "the number is out of range");
  return result;
}

std::pair<simdjson::dom::object, std::string_view> JsonFile::typed(simdjson::dom::element value,
                                                                   std::string_view path) const {
  const auto fields = object(value, path);
  const auto type = member(fields, "type");
  if (!type) fail_at(path, "there is no `type`");
  return {fields, text(*type, child(path, "type"))};
}

void JsonFile::fail_unknown(std::string_view path, std::string_view kind, std::string_view type,
                            std::string_view known) const {
  fail(ErrorCode::unsupported,
       name_ + ": " + std::string(path) + ": the " + std::string(kind) + " " + quoted(type) +
           " is not supported",
       "supported here: " + std::string(known));
}

int32_t JsonFile::token_id(simdjson::dom::element value, std::string_view path) const {
  const int64_t id = integer(value, path);
  if (id < 0 || id > INT32_MAX - 1) fail_at(path, "the id " + std::to_string(id) + " is out of range");
  return static_cast<int32_t>(id);
}

std::string child(std::string_view path, std::string_view key) {
  return std::string(path) + "." + std::string(key);
}
std::string child(std::string_view path, size_t index) {
  return std::string(path) + "[" + std::to_string(index) + "]";
}

simdjson::dom::element JsonFile::needed(simdjson::dom::object object, std::string_view path,
                                        std::string_view key) const {
  const auto value = member(object, key);
  if (!value) fail_at(path, "there is no `" + std::string(key) + "`");
  return *value;
}

std::optional<simdjson::dom::element> JsonFile::member(simdjson::dom::object object,
                                                       std::string_view key) const {
  simdjson::dom::element value;
  if (object.at_key(key).get(value) || value.is_null()) return std::nullopt;
  return value;
}
std::string_view JsonFile::text_or(simdjson::dom::object object, std::string_view path, std::string_view key,
                                   std::string_view otherwise) const {
  const auto value = member(object, key);
  return value ? text(*value, std::string(path) + "." + std::string(key)) : otherwise;
}
bool JsonFile::boolean_or(simdjson::dom::object object, std::string_view path, std::string_view key,
                          bool otherwise) const {
  const auto value = member(object, key);
  return value ? boolean(*value, std::string(path) + "." + std::string(key)) : otherwise;
}

}  // namespace capstan::text
