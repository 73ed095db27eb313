// The ask-and-tell interface for external optimizers, one JSON object per line: ask for the next trial or for
// one with given values; tell or read a result. This module composes, checks and stores the trials.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "sweep/store.hpp"

namespace capstan::sweep {

// {} the next trial that is pending; {"trial": null} when there is none
// {"values": {"optimizer.lr": 3e-4}, "seed": 1} the trial with these values, made where it is not there yet
// Answer: {"trial": ID, "new": …, "label": …, "values": {…}, "seed": …, "state": …, "recipe": FILE,
// "command": [sweep run …]}. `given`: trials that this conversation has handed out; they are not the next one
// again. Throws ErrorCode::usage for a line that is no such object, ErrorCode::config for values that no
// trial can be made of.
std::string ask(Store& store, std::string_view line, std::set<std::string>& given);

// {"trial": ID}                                 how it stands
// {"trial": ID, "value": 2.5, "step": 100}      it is done elsewhere, with this metric
// {"trial": ID, "state": "failed", "reason": …} likewise failed, or pruned
// Answer: {"trial": ID, "state": …, "value": …, "step": …, "reason": …}; `value` is null while there is none.
// Throws
// ErrorCode::usage, ::not_found for an unknown trial, ::failed when it is done already or somebody works on
// it.
std::string tell(Store& store, std::string_view line);

}  // namespace capstan::sweep
