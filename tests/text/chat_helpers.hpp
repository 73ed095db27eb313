// Helpers of the tests of chat templates.
#pragma once

#include <string>

#include "base/json.hpp"
#include "text/chat/value.hpp"

namespace capstan::testing {

inline text::chat::Value chat_value(const nlohmann::ordered_json& json) {
  using text::chat::List;
  using text::chat::Map;
  using text::chat::None;
  using text::chat::Value;
  if (json.is_boolean()) return Value(json.get<bool>());
  if (json.is_number_integer()) return Value(json.get<int64_t>());
  if (json.is_number()) return Value(json.get<double>());
  if (json.is_string()) return Value(json.get<std::string>());
  if (json.is_array()) {
    List items;
    for (const auto& item : json) items.push_back(chat_value(item));
    return *Value::list(std::move(items));
  }
  if (json.is_object()) {
    Map map;
    for (const auto& [key, item] : json.items()) map.set(key, chat_value(item));
    return *Value::map(std::move(map));
  }
  return Value(None{});
}

}  // namespace capstan::testing
