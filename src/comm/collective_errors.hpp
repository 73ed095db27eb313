// Errors and texts that all ranks of a group share: a failure on one rank becomes the same failure on all
// ranks.
#pragma once

#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/communicator.hpp"

namespace capstan::comm {

// Gathers one text from every rank, ordered by rank, on all ranks. Collective.
std::vector<std::string> gather_texts(Communicator& group, const std::string& mine);

// Runs `work` on this rank, and throws on every rank if it failed on any: its error on the rank that failed,
// ErrorCode::rank_failure with that rank and its error on the others. `what` describes the work in messages.
// Collective.
void run_collectively(Communicator& group, const char* what, FunctionRef<void()> work);

}  // namespace capstan::comm
