#include "base/json.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan {

Json parse_json(std::string_view text, const std::string& file, int max_depth) {
  std::vector<std::unordered_set<std::string>> keys;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case Json::parse_event_t::array_start:
        if (depth >= max_depth)
          fail(ErrorCode::format, file + ": JSON nested deeper than " + std::to_string(max_depth));
        break;
      case Json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!keys.back().insert(value.get_ref<const std::string&>()).second)
          fail(ErrorCode::format, file + ": duplicate key " + in_quotes(value.get_ref<const std::string&>()));
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    refuse_placeholder(text, file);
    const auto* found = dynamic_cast<const Json::parse_error*>(&error);
    fail(ErrorCode::format, file + ":" +
                                line_and_column(text, found && found->byte > 0 ? found->byte - 1 : 0) +
                                ": bad JSON: " + json_reason(error).substr(0, 200));
  }
}

Json json_of(std::string_view text, IfNotJson otherwise) {
  return Json::parse(text, nullptr, otherwise == IfNotJson::raise);
}
OrderedJson ordered_json_of(std::string_view text, IfNotJson otherwise) {
  return OrderedJson::parse(text, nullptr, otherwise == IfNotJson::raise);
}

std::string json_reason(const Json::exception& error) {
  std::string reason = error.what();
  if (const size_t at = reason.find(": "); at != std::string::npos) reason.erase(0, at + 2);
  return reason;
}

std::optional<JsonProblem> find_json_problem(std::string_view text) {
  struct Finder : Json::json_sax_t {
    std::optional<JsonProblem> problem;
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
      problem = {at > 0 ? at - 1 : 0, json_reason(error)};
      return false;
    }
  } finder;
  Json::sax_parse(text, &finder);
  return finder.problem;
}

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}
std::string dump_json(const OrderedJson& value, int indent) {
  return value.dump(indent, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string json_excerpt(const Json& value) {
  std::string text = dump_json(value);
  if (text.size() > 60) text.resize(60), text += "…";
  return text;
}

JsonView JsonView::at(const char* key) const {
  const auto& map = object();
  const auto found = map.find(key);
  if (found == map.end()) refuse("lacks `" + std::string(key) + "`");
  return {*found, file_, path_ + "." + key};
}
const Json& JsonView::object() const {
  require(value_->is_object(), "an object");
  return *value_;
}
const Json& JsonView::array() const {
  require(value_->is_array(), "an array");
  return *value_;
}
std::vector<JsonView> JsonView::items() const {
  std::vector<JsonView> result;
  for (const Json& item : array())
    result.push_back({item, file_, path_ + "[" + std::to_string(result.size()) + "]"});
  return result;
}
const std::string& JsonView::string() const {
  require(value_->is_string(), "a string");
  return value_->get_ref<const std::string&>();
}
bool JsonView::boolean() const {
  require(value_->is_boolean(), "true or false");
  return value_->get<bool>();
}
double JsonView::number() const {
  require(value_->is_number() && std::isfinite(value_->get<double>()), "a finite number");
  return value_->get<double>();
}
int64_t JsonView::integer(int64_t least, int64_t most) const {
  require(value_->is_number_integer() && value_->get<int64_t>() >= least && value_->get<int64_t>() <= most &&
              !(value_->is_number_unsigned() && value_->get<uint64_t>() > INT64_MAX),
          "an integer from " + std::to_string(least) + " to " + std::to_string(most));
  return value_->get<int64_t>();
}
int64_t JsonView::count() const {
  require(value_->is_number_unsigned() && value_->get<uint64_t>() <= INT64_MAX, "an integer in [0, 2^63)");
  return value_->get<int64_t>();
}
void JsonView::require(bool is, std::string_view expected) const {
  if (!is) refuse("is not " + std::string(expected) + " but " + json_excerpt(*value_));
}
void JsonView::only(std::initializer_list<std::string_view> keys) const {
  for (const auto& [key, value] : object().items())
    if (std::find(keys.begin(), keys.end(), key) == keys.end())
      refuse("has the unknown key " + in_quotes(key));
}
void JsonView::refuse(const std::string& what) const {
  fail(ErrorCode::format, file_ + ": `" + (path_.empty() ? "." : path_) + "` " + what);
}

}  // namespace capstan
