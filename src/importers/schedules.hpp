// The length of a run and its learning-rate schedule by the names of Transformers, which other trainers pass
// on.
#pragma once

#include <string>
#include <string_view>

#include "importers/rule.hpp"

namespace capstan::importers {

// The schedule `type` that `key` of the document names.
void transformers_schedule(Reader& reader, std::string_view key, const std::string& type);
// Reads `lr_scheduler_kwargs` of that schedule: minimum, length and form of the decay.
void transformers_schedule_options(Reader& reader, const std::string& type);
// Sets what the schedule `type` means by what is not given, or takes the schedule back if it is another one
// then. To be called after its options and its warm-up were read.
void transformers_schedule_defaults(Draft& draft, const std::string& type);
// Reads `warmup_steps`; a number below 1 is a fraction of the run.
void transformers_warmup(Reader& reader);

// The default number of epochs of a trainer. If `text` is empty, the configuration must give the number.
struct DefaultEpochs {
  std::string text, reason;
};
// Reads the length of the run from `max_steps`, else from the number of epochs under the key `epochs`.
void transformers_length(Reader& reader, std::string_view epochs, const DefaultEpochs& otherwise);
// Sets the length of the run in epochs over the data of the draft, or of the recipe that it extends. If there
// is no data, lists a number of steps that the user must fill in.
void length_in_epochs(Reader& reader, std::string_view epochs, const DefaultEpochs& otherwise);

}  // namespace capstan::importers
