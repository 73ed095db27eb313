// Learning-rate schedules by the names of Transformers, which other trainers pass on.
#pragma once

#include <string>
#include <string_view>

#include "import/rule.hpp"

namespace capstan::importer {

// The schedule `type` that `key` of the document names.
void transformers_schedule(Reader& reader, std::string_view key, const std::string& type);
// Its `lr_scheduler_kwargs`: floors, lengths and forms of the decay.
void transformers_schedule_options(Reader& reader, const std::string& type);

}  // namespace capstan::importer
