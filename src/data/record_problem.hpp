// What is wrong with a record of an input file, and where. Private to the readers (it pulls in simdjson).
#pragma once

#include <simdjson.h>

#include <string>
#include <string_view>

#include "data/record_reader.hpp"

namespace capstan::data {

struct RecordProblem {
  size_t byte;  // in the record's text
  std::string reason;
};

// "PATH:LINE:COLUMN" of a byte of the record's text.
std::string place_of(const Record& record, std::string_view text, size_t byte, const std::string& path);

// Why a text is not JSON, which simdjson has said with this code.
RecordProblem json_problem(std::string_view text, simdjson::error_code error);

std::string_view kind_of(simdjson::dom::element_type type);  // "a list", "an object"

}  // namespace capstan::data
