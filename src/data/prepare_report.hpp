// The result and the progress of data preparation, for people and for scripts.
#pragma once

#include <string>

#include "data/prepare.hpp"

namespace capstan::data {

// A few lines: what was written and skipped, and the command that inspects it.
std::string to_text(const PrepareResult& result);
// The result as one JSON object.
std::string to_json(const PrepareResult& result);
// "12.3 MB/s  4.1M tokens  63 %  8s left": one line without a line break.
std::string to_text(const PrepareProgress& progress);

}  // namespace capstan::data
