// `--nproc N`: runs the same command as N ranks under mpirun, and waits for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "cli/context.hpp"
#include "comm/world.hpp"

namespace capstan::cli {

// Runs the command without its --nproc as `ranks` ranks and waits. SIGINT and SIGTERM become a request to
// save (a file that the ranks look for after each step; SIGTERM would make mpirun kill them), a second one
// ends them.
// Returns the exit code of the run: 75 and the codes of `capstan help exit-codes` as the ranks gave them, 4
// for a rank that died or stalled (reported here, from the ranks' status table), 130 or 143 when ended by the
// second signal. saves_on_signal false: the first one ends them (train.exit_signal_handler).
// death: is set to the reason if a rank or mpirun died, or a second signal ended them.
int launch_ranks(const Context& context, int64_t ranks, bool saves_on_signal = true,
                 std::string* death = nullptr);

// Joins the world of this process and runs `body` in it. With several ranks an error is reported here and
// aborts all of them: an orderly shutdown would wait for ranks that wait for this one. A rank that is gone,
// or keeps the others waiting for `timeout` seconds, is reported once and aborts them too: code 4.
int run_in_world(const Context& context, double timeout, FunctionRef<int(comm::World&)> body);

// The path of this executable.
std::string own_path();

// Whether another Capstan process started this rank with `--nproc`. The parent has shown the notes of the
// recipe already.
bool has_parent();

// The command line as the user gave it: that of the parent process if there is one.
std::vector<std::string> given_command(const Context& context);

}  // namespace capstan::cli
