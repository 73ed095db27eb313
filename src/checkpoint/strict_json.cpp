#include "checkpoint/strict_json.hpp"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"

namespace capstan::checkpoint {

using nlohmann::json;

json parse_strict_json(std::string_view text, const std::string& file, int max_depth) {
  std::vector<std::unordered_set<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case json::parse_event_t::array_start:
        if (depth >= max_depth)
          fail(ErrorCode::format, file + ": JSON nested deeper than " + std::to_string(max_depth));
        break;
      case json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case json::parse_event_t::key:
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
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& error) {
    refuse_placeholder(text, file);
    std::string reason = error.what();
    if (const size_t at = reason.find(": "); at != std::string::npos) reason.erase(0, at + 2);
    const auto* place = dynamic_cast<const json::parse_error*>(&error);
    fail(ErrorCode::format, file + ": offset " +
                                std::to_string(place && place->byte > 0 ? place->byte - 1 : 0) +
                                ": bad JSON: " + reason.substr(0, 200));
  }
}

JsonView JsonView::at(const char* key) const {
  const auto& map = object();
  const auto found = map.find(key);
  if (found == map.end()) refuse("lacks `" + std::string(key) + "`");
  return {*found, file_, path_ + "." + key};
}
const json& JsonView::object() const {
  if (!value_->is_object()) refuse("is not an object");
  return *value_;
}
const json& JsonView::array() const {
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

}  // namespace capstan::checkpoint
