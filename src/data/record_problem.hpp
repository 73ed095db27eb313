// A problem with a record of an input file, and its location. Private to the readers (it pulls in simdjson).
#pragma once

#include <simdjson.h>

#include <string>
#include <string_view>

#include "data/record_reader.hpp"

namespace capstan::data {

struct RecordProblem {
  // Offset in the record's text.
  size_t byte;
  std::string reason;
};

// "PATH:LINE:COLUMN" of a byte of the record's text.
std::string location_of(const Record& record, std::string_view text, size_t byte, const std::string& path);

// Why a text is not JSON; `error` is the code that simdjson returned.
RecordProblem json_problem(std::string_view text, simdjson::error_code error);

// The type in words, such as "a list" or "an object".
std::string_view kind_of(simdjson::dom::element_type type);

}  // namespace capstan::data
