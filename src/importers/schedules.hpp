// The length of a run and its learning-rate schedule by the names of Transformers, which other trainers pass
// on.
#pragma once

#include <string>
#include <string_view>

#include "importers/rule.hpp"

namespace capstan::importers {

// The schedule `type` that `key` of the document names.
void transformers_schedule(Reader& reader, std::string_view key, const std::string& type);
// Its `lr_scheduler_kwargs`: floors, lengths and forms of the decay.
void transformers_schedule_options(Reader& reader, const std::string& type);
// `warmup_steps`, of which a number below 1 is a share of the run.
void transformers_warmup(Reader& reader);

// Passes that a trainer makes over the data where its configuration says nothing; text empty: it has to say
// something.
struct DefaultEpochs {
  std::string text, reason;
};
// `max_steps`, else the passes that `epochs` names.
void transformers_length(Reader& reader, std::string_view epochs, const DefaultEpochs& otherwise);
// Passes over the data of the draft or of the recipe that it extends; where there is no data, a number of
// steps to fill in.
void length_in_epochs(Reader& reader, std::string_view epochs, const DefaultEpochs& otherwise);

}  // namespace capstan::importers
