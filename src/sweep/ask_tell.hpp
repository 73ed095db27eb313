// The ask-and-tell interface for external optimizers, one JSON object per line: ask for the next trial or for
// one with given values; tell or read a result. This module composes, checks and stores the trials.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "sweep/store.hpp"

namespace capstan::sweep {

// Answers one request, a line of JSON:
// {} asks for the next pending trial. The answer is {"trial": null} if there is none.
// {"values": {"optimizer.lr": 3e-4}, "seed": 1} asks for the trial with these values, which is added if it
// does not exist.
// The answer is {"trial": ID, "new": …, "label": …, "values": {…}, "seed": …, "state": …, "recipe": FILE,
// "command": [sweep run …]}.
// `given` holds the trials that this conversation has handed out already; they are not handed out again.
// Throws ErrorCode::usage for a line that is no such object, and ErrorCode::config for values of which no
// trial can be made.
std::string ask(Store& store, std::string_view line, std::set<std::string>& given);

// Records or reads a result, given as a line of JSON:
// {"trial": ID} asks for the state of the trial.
// {"trial": ID, "value": 2.5, "step": 100} reports that the trial was run elsewhere, with this metric.
// {"trial": ID, "state": "failed", "reason": …} reports that it failed; "pruned" works likewise.
// The answer is {"trial": ID, "state": …, "value": …, "step": …, "reason": …}. `value` is null if there is
// none yet. Throws ErrorCode::usage for other lines, ::not_found for an unknown trial, and ::failed if the
// trial is done already or another process works on it.
std::string tell(Store& store, std::string_view line);

}  // namespace capstan::sweep
