#include "data/record_problem.hpp"

#include <algorithm>

#include "base/json.hpp"
#include "base/utf8.hpp"

namespace capstan::data {

std::string location_of(const Record& record, std::string_view text, size_t byte, const std::string& path) {
  const auto before = text.substr(0, std::min(byte, text.size()));
  const auto breaks = std::count(before.begin(), before.end(), '\n');
  const auto last = before.rfind('\n');
  const auto in_line = last == std::string_view::npos ? before : before.substr(last + 1);
  const int64_t column =
      static_cast<int64_t>(count_code_points(in_line)) + (last == std::string_view::npos ? record.column : 1);
  return path + ":" + std::to_string(record.line + breaks) + ":" + std::to_string(column);
}

// simdjson reports only that the text is not JSON; the stricter parser reports location and reason.
RecordProblem json_problem(std::string_view text, simdjson::error_code error) {
  if (const auto at = first_invalid_utf8(text)) return {*at, "invalid UTF-8"};
  if (const auto found = find_json_problem(text)) return {found->offset, "not JSON: " + found->reason};
  return {0, std::string("not JSON: ") + simdjson::error_message(error)};
}

std::string_view kind_of(simdjson::dom::element_type type) {
  switch (type) {
    case simdjson::dom::element_type::ARRAY:
      return "a list";
    case simdjson::dom::element_type::OBJECT:
      return "an object";
    case simdjson::dom::element_type::STRING:
      return "a string";
    case simdjson::dom::element_type::BOOL:
      return "true or false";
    case simdjson::dom::element_type::NULL_VALUE:
      return "null";
    default:
      return "a number";
  }
}

}  // namespace capstan::data
