#include "base/json.hpp"

#include <algorithm>
#include <unordered_set>
#include <vector>

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
          fail(ErrorCode::format,
               file + ": duplicate key " + capstan::quoted(value.get_ref<const std::string&>()));
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
    std::string reason = error.what();
    if (const size_t at = reason.find(": "); at != std::string::npos) reason.erase(0, at + 2);
    const auto* found = dynamic_cast<const Json::parse_error*>(&error);
    const auto before = text.substr(0, found && found->byte > 0 ? found->byte - 1 : 0);
    const auto line_start = before.rfind('\n') + 1;  // 0 without a line break
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const auto column = 1 + count_code_points(before.substr(line_start));
    fail(ErrorCode::format, file + ":" + std::to_string(line) + ":" + std::to_string(column) +
                                ": bad JSON: " + reason.substr(0, 200));
  }
}

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}
std::string dump_json(const OrderedJson& value, int indent) {
  return value.dump(indent, ' ', false, OrderedJson::error_handler_t::replace);
}

JsonView JsonView::at(const char* key) const {
  const auto& map = object();
  const auto found = map.find(key);
  if (found == map.end()) refuse("lacks `" + std::string(key) + "`");
  return {*found, file_, path_ + "." + key};
}
const Json& JsonView::object() const {
  if (!value_->is_object()) refuse("is not an object");
  return *value_;
}
const Json& JsonView::array() const {
  if (!value_->is_array()) refuse("is not an array");
  return *value_;
}
const std::string& JsonView::string() const {
  if (!value_->is_string()) refuse("is not a string");
  return value_->get_ref<const std::string&>();
}
int64_t JsonView::count() const {
  if (!value_->is_number_unsigned() || value_->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    refuse("is not a whole number in [0, 2^63)");
  return value_->get<int64_t>();
}
void JsonView::only(std::initializer_list<std::string_view> keys) const {
  for (const auto& [key, value] : object().items())
    if (std::find(keys.begin(), keys.end(), key) == keys.end())
      refuse("has the unknown key " + capstan::quoted(key));
}
void JsonView::refuse(const std::string& what) const {
  fail(ErrorCode::format, file_ + ": `" + (path_.empty() ? "." : path_) + "` " + what);
}

}  // namespace capstan
